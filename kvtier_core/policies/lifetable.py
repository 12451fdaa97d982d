"""The odds that a chunk comes back, by its class and its idle time, and the order that follows from them.

csrc/policies/lifetable.cpp computes the same to the last bit. So the order and precision of each addition are fixed:
no ``sum`` of floats, which is compensated from Python 3.12 on, and no powers other than of two.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
import struct

#: Ages in seconds at which a step begins: factors of the square root of two, from half a second to days.
EDGES = [0.0, *(math.ldexp(math.sqrt(1 + i % 2), i // 2 - 1) for i in range(39)), math.inf]
AGES = len(EDGES) - 1

_WIDTHS = [end - begin for begin, end in itertools.pairwise(EDGES[:-1])] + [EDGES[-2]]
_HEADER = struct.Struct("<8sII")
_MAGIC = b"kvlives1"
#: Maximum weight of a restored table, in returns: enough to know the traffic, few enough to learn that it changed.
_TRUSTED = 1000.0
#: The weight, in votes, of a family's odds in a class, of those of all classes in a family, and of `_GUESS` in all.
_SHRINK = 20.0
#: Odds of a return within a step while nothing is known: the rate falls with age.
_GUESS = [0.17 * width / (begin + width) for begin, width in zip(EDGES, _WIDTHS, strict=False)]


class LifeTable:
    """Votes on lives that ended with a return in some step of age, or continued into the next step.

    There are ``families`` times ``size`` classes. If a class saw few lives, its odds are pulled towards those of its
    family, and these towards those of all classes.
    """

    def __init__(self, families: int, size: int):
        self._size = size
        self._returns = [[0.0] * AGES for _ in range(families * size)]
        self._lives = [[0.0] * AGES for _ in range(families * size)]  # that a step saw end, or pass into the next one
        self.index: list[list[float]] = []  # for each class and age the best rate of returns per second
        self.order: list[tuple[int, int]] = []  # classes and ages, the lowest index first
        self.rank_of: list[list[int]] = []
        self.rank([[0.0] * AGES for _ in self._lives])

    def returned(self, cls: int, age: int, votes: float) -> None:
        """Lives of a class ended with a return in this step of age."""
        self._returns[cls][age] += votes
        self._lives[cls][age] += votes

    def went_on(self, cls: int, age: int, votes: float) -> None:
        """Lives of a class passed this step of age without a return."""
        self._lives[cls][age] += votes

    def fade(self, factor: float) -> None:
        """Make old votes count less."""
        for row in (*self._returns, *self._lives):
            row[:] = [votes * factor for votes in row]

    def rank(self, waiting: list[list[float]]) -> None:
        """Compute index and order from the votes. Lives ``waiting`` within a step count half, as actuaries do."""
        lives = [
            [seen + still / 2 for seen, still in zip(*rows, strict=True)]
            for rows in zip(self._lives, waiting, strict=True)
        ]
        overall = _shrunk(_summed(self._returns), _summed(lives), _GUESS)
        self.index = []
        for begin in range(0, len(lives), self._size):
            family = slice(begin, begin + self._size)
            odds = _shrunk(_summed(self._returns[family]), _summed(lives[family]), overall)
            for votes in zip(self._returns[family], lives[family], strict=True):
                self.index.append(_gittins(_shrunk(*votes, odds)))
        cells = itertools.product(range(len(self.index)), range(AGES))
        self.order = sorted(cells, key=lambda cell: (self.index[cell[0]][cell[1]], -cell[1], cell[0]))
        self.rank_of = [[0] * AGES for _ in self.index]
        for rank, (cls, age) in enumerate(self.order):
            self.rank_of[cls][age] = rank

    def save(self) -> bytes:
        """The votes, always in the same number of bytes."""
        votes = [each for row in (*self._returns, *self._lives) for each in row]
        return _HEADER.pack(_MAGIC, len(self._lives), AGES) + struct.pack(f"<{len(votes)}f", *votes)

    def restore(self, saved: bytes) -> bool:
        """Take over saved votes, as `_TRUSTED` returns at most; False, without any change, for any other bytes."""
        count = len(self._lives) * AGES
        header = _HEADER.pack(_MAGIC, len(self._lives), AGES)
        if len(saved) != len(header) + 8 * count or not saved.startswith(header):
            return False
        votes = struct.unpack_from(f"<{2 * count}f", saved, _HEADER.size)
        returns, lives = votes[:count], votes[count:]
        # Votes were rounded when they were saved. A NaN fails this comparison.
        if not all(0 <= came <= seen * 1.001 < 1e30 for came, seen in zip(returns, lives, strict=True)):
            return False
        factor = min(1.0, _TRUSTED / max(1.0, functools.reduce(operator.add, returns)))
        for cls in range(len(self._lives)):
            row = slice(cls * AGES, (cls + 1) * AGES)
            self._returns[cls] = [each * factor for each in returns[row]]
            self._lives[cls] = [each * factor for each in lives[row]]
        return True


def _summed(rows: list[list[float]]) -> list[float]:
    return [functools.reduce(operator.add, column) for column in zip(*rows, strict=True)]


def _shrunk(returns: list[float], lives: list[float], towards: list[float]) -> list[float]:
    """Odds of a return within each step, pulled towards others if few lives were seen."""
    return [
        (came + _SHRINK * other) / (seen + _SHRINK) for came, seen, other in zip(returns, lives, towards, strict=True)
    ]


def _gittins(odds: list[float]) -> list[float]:
    """For each age the best rate of returns over all horizons.

    A chunk's chance to have returned, plotted over its idle time, is a curve. The best rate at an age is the slope of
    the steepest line from that point to a later one: an edge of the upper hull of the rest of the curve.
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
