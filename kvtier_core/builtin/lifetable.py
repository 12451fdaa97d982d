"""The odds that a chunk comes back, by its class and by how long it was idle, and the order that follows from them."""

from __future__ import annotations

import itertools
import math

#: Ages in seconds at which a step begins: half octaves, from a moment to days.
EDGES = [0.0, *(0.5 * 2 ** (i / 2) for i in range(39)), math.inf]
AGES = len(EDGES) - 1

_WIDTHS = [end - begin for begin, end in itertools.pairwise(EDGES[:-1])] + [EDGES[-2]]
#: How many votes the table of all classes has in that of each class, and a guess in that of all.
_SHRINK = 30.0
#: Odds of a return within a step while nothing is known: the same in each, so that the rate falls with the age.
_GUESS = 0.05


class LifeTable:
    """Votes on lives that ended with a return in some step of age, or went on into the next."""

    def __init__(self, classes: int):
        self.returns = [[0.0] * AGES for _ in range(classes)]
        self.lives = [[0.0] * AGES for _ in range(classes)]  # that a step saw to its end
        self.index = [[0.0] * AGES for _ in range(classes)]  # the best rate of returns, a second of room
        self.order: list[tuple[int, int]] = []  # classes and ages, the lowest index first
        self.rank_of: list[list[int]] = []
        self.rank()

    def returned(self, cls: int, age: int, votes: float) -> None:
        self.returns[cls][age] += votes
        self.lives[cls][age] += votes

    def went_on(self, cls: int, age: int, votes: float) -> None:
        self.lives[cls][age] += votes

    def fade(self, factor: float) -> None:
        """What was long ago counts less."""
        for table in (self.returns, self.lives):
            for row in table:
                row[:] = [votes * factor for votes in row]

    def rank(self) -> None:
        """Take the votes into the index and the order."""
        returns = [sum(column) for column in zip(*self.returns, strict=True)]
        lives = [sum(column) for column in zip(*self.lives, strict=True)]
        odds = _shrunk(returns, lives, [_GUESS] * AGES)
        self.index = [
            _gittins(_shrunk(*votes, odds)) for votes in zip(self.returns, self.lives, strict=True)
        ]
        cells = itertools.product(range(len(self.index)), range(AGES))
        self.order = sorted(cells, key=lambda cell: (self.index[cell[0]][cell[1]], -cell[1], cell[0]))
        self.rank_of = [[0] * AGES for _ in self.index]
        for rank, (cls, age) in enumerate(self.order):
            self.rank_of[cls][age] = rank


def _shrunk(returns: list[float], lives: list[float], towards: list[float]) -> list[float]:
    """Odds of a return within each step, pulled towards others where few lives were seen."""
    return [
        (came + _SHRINK * other) / (seen + _SHRINK) for came, seen, other in zip(returns, lives, towards, strict=True)
    ]


def _gittins(odds: list[float]) -> list[float]:
    """For each age the best rate of returns over all horizons.

    Drawn over the time a chunk of age 0 spends idle, its chance to have returned is a curve; from any point of it the
    steepest line to a later one is an edge of the curve's upper hull from there on.
    """
    points = [(0.0, 0.0)]
    alive = 1.0
    for chance, width in zip(odds, _WIDTHS, strict=True):
        time, hits = points[-1]
        points.append((time + alive * width * (1 - chance / 2), hits + alive * chance))
        alive *= 1 - chance
    hull: list[tuple[float, float]] = [points[-1]]
    index = [0.0] * len(odds)
    for i in range(len(odds) - 1, -1, -1):
        while len(hull) > 1 and _slope(points[i], hull[-2]) >= _slope(points[i], hull[-1]):
            hull.pop()
        index[i] = _slope(points[i], hull[-1])
        hull.append(points[i])
    return index


def _slope(a: tuple[float, float], b: tuple[float, float]) -> float:
    return (b[1] - a[1]) / (b[0] - a[0]) if b[0] > a[0] else 0.0
