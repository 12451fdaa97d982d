"""The odds that a chunk comes back, by its class and by how long it was idle, and the order that follows from them.

csrc/policies/lifetable.cpp computes the same to the last bit. So nothing here leaves open in which order or how
exactly it adds: no ``sum`` of floats, which is compensated from Python 3.12 on, and no power but of two.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
import struct

#: Ages in seconds at which a step begins: half octaves, from a moment to days.
EDGES = [0.0, *(math.ldexp(math.sqrt(1 + i % 2), i // 2 - 1) for i in range(39)), math.inf]
AGES = len(EDGES) - 1

_WIDTHS = [end - begin for begin, end in itertools.pairwise(EDGES[:-1])] + [EDGES[-2]]
_HEADER = struct.Struct("<8sII")
_MAGIC = b"kvlives1"
#: Returns that a restored table may have seen: enough to know the traffic, few enough to learn that it is another.
_TRUSTED = 1000.0
#: How many votes the family has in the table of a class, all classes in that of a family, and a guess in that of all.
_SHRINK = 20.0
#: Odds of a return within a step while nothing is known: the rate falls as the age grows.
_GUESS = [0.17 * width / (begin + width) for begin, width in zip(EDGES, _WIDTHS, strict=False)]


class LifeTable:
    """Votes on lives that ended with a return in some step of age, or went on into the next.

    Classes lie in families of one size. Where a class saw few lives, its odds lean on its family's, and those on all.
    """

    def __init__(self, families: int, size: int):
        self._size = size
        self._returns = [[0.0] * AGES for _ in range(families * size)]
        self._lives = [[0.0] * AGES for _ in range(families * size)]  # that a step saw to its end
        self.index: list[list[float]] = []  # for each class and age the best rate of returns, a second of room
        self.order: list[tuple[int, int]] = []  # classes and ages, the lowest index first
        self.rank_of: list[list[int]] = []
        self.rank([[0.0] * AGES for _ in self._lives])

    def returned(self, cls: int, age: int, votes: float) -> None:
        self._returns[cls][age] += votes
        self._lives[cls][age] += votes

    def went_on(self, cls: int, age: int, votes: float) -> None:
        self._lives[cls][age] += votes

    def fade(self, factor: float) -> None:
        """What was long ago counts less."""
        for row in (*self._returns, *self._lives):
            row[:] = [votes * factor for votes in row]

    def rank(self, waiting: list[list[float]]) -> None:
        """Take the votes into the index and the order. Those ``waiting`` within a step count half, as actuaries do."""
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
        """The votes, in a form of fixed length."""
        votes = [each for row in (*self._returns, *self._lives) for each in row]
        return _HEADER.pack(_MAGIC, len(self._lives), AGES) + struct.pack(f"<{len(votes)}f", *votes)

    def restore(self, saved: bytes) -> bool:
        """Take in what was saved, as no more than `_TRUSTED` votes; False if it is not that."""
        count = len(self._lives) * AGES
        if len(saved) != _HEADER.size + 8 * count or saved[: _HEADER.size] != _HEADER.pack(
            _MAGIC, len(self._lives), AGES
        ):
            return False
        votes = struct.unpack_from(f"<{2 * count}f", saved, _HEADER.size)
        returns, lives = votes[:count], votes[count:]
        # Floats are rounded as they are saved; a NaN fails this comparison.
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
