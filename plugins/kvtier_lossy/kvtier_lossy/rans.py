"""Entropy coding of many streams side by side: rANS (J. Duda, "Asymmetric numeral systems", 2013), whose streams share
one output as in F. Giesen, "Interleaved entropy coders", 2014.

Each stream has a state of 32 bits, and all of them take their next symbol in the same step, so a step is a few
operations of numpy. Where a state would overflow, its lower 16 bits become a word of the output. The decoder reads the
words in the order of steps and, within a step, in the order of streams; the encoder works backwards.

A symbol is an integer from ``-levels`` to ``levels``. Its frequency, out of `TOTAL`, is that of one of `TABLES` tables,
each symmetric and falling from 0 outwards: half of them fall like a normal, the others like a Laplace distribution.
They are computed from products and quotients of floats only, which every machine rounds alike.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

_BITS = 12
TOTAL = 1 << _BITS
_LOW = 1 << 16  #: states are at least this, between two steps
TABLES = 32
_COST_OF_A_BIT = 64
#: The least number of symbols in a stream, because its final state takes 32 bits; and the number of streams below which
#: each has one column, because a step takes a microsecond for each operation, however few streams there are.
_LONG, _MANY = 1024, 256

Symbols = npt.NDArray[np.int8]
Words = npt.NDArray[np.uint16]
States = npt.NDArray[np.uint32]


class Tables:
    """The tables for one number of levels."""

    def __init__(self, levels: int):
        self.levels = levels
        size = 2 * levels + 1
        of_tables = [_frequencies(number, levels) for number in range(TABLES)]
        frequencies = np.array(of_tables, np.uint32)
        begins = np.cumsum(frequencies, axis=1, dtype=np.uint32) - frequencies
        #: For each symbol of each table: where its share of `TOTAL` begins, and from bit 16 on its frequency.
        self.shares = (frequencies << 16 | begins).ravel()
        self.size = size
        slots = np.tile(np.arange(TOTAL, dtype=np.uint32), TABLES)
        symbol = np.repeat(np.tile(np.arange(size), TABLES), frequencies.ravel()).astype(np.uint32)
        of_symbol = np.repeat(self.shares, frequencies.ravel())
        #: For each slot of each table: the symbol, from bit 8 on the place in its share, from bit 20 on its frequency.
        self.slots = of_symbol >> 16 << 20 | slots - (of_symbol & 0xFFFF) << 8 | symbol
        costs = [[round(_COST_OF_A_BIT * (_BITS - math.log2(each))) for each in table[levels:]] for table in of_tables]
        self._costs = np.array(costs, np.int64).T

    def cheapest(self, symbols: Symbols) -> npt.NDArray[np.uint8]:
        """For each column, the table with which its symbols take the fewest bits."""
        columns = symbols.shape[1]
        bins = np.abs(symbols).astype(np.int64) + np.arange(columns) * (self.levels + 1)
        counts = np.bincount(bins.ravel(), minlength=columns * (self.levels + 1)).reshape(columns, -1)
        return np.asarray((counts @ self._costs).argmin(1), np.uint8)


def _frequencies(number: int, levels: int) -> list[int]:
    """For each symbol, from -levels on; each at least 1, and ``TOTAL`` together."""
    kind, width = number % 2, number // 2
    if kind == 0:  # each ratio of neighbours is smaller than the one before by the same factor
        variance = 0.1 * _power(1.7, width)
        factor = 2 * variance / (2 * variance + 1)
        weights = [1.0]
        ratio = factor
        for _ in range(levels):
            weights.append(weights[-1] * ratio)
            ratio *= factor * factor
    else:
        deviation = 0.2 * _power(1.4, width)
        weights = [1.0]
        for _ in range(levels):
            weights.append(weights[-1] * (deviation / (deviation + 1)))
    room = TOTAL - (2 * levels + 1)
    every = 2 * math.fsum(weights[1:]) + 1.0
    outwards = [1 + int(room * weight / every) for weight in weights[1:]]
    return [*reversed(outwards), TOTAL - 2 * sum(outwards), *outwards]


def _power(base: float, exponent: int) -> float:
    return math.prod([base] * exponent)


def streams(steps: int, columns: int) -> int:
    """How many streams code ``columns`` columns of ``steps`` symbols: some take several in turn, to be long."""
    count = columns
    while count % 2 == 0 and count >= _MANY and steps * columns < _LONG * count:
        count //= 2
    return count


def encode(symbols: Symbols, tables: npt.NDArray[np.uint8], of: Tables) -> tuple[States, Words]:
    """The states and the words of a matrix of symbols, whose column ``c`` is coded with ``tables[c]``."""
    steps, columns = symbols.shape
    count = streams(steps, columns)
    states = np.full(count, _LOW, np.uint32)
    words: list[Words] = []
    firsts = tables.astype(np.int32) * of.size + of.levels
    for begin in range(columns - count, -1, -count):
        share = slice(begin, begin + count)
        for row in symbols[::-1, share]:
            shares = np.take(of.shares, firsts[share] + row, mode="clip")
            frequencies = shares >> 16
            full = states >= frequencies << (32 - _BITS)
            words.append(states[full].astype(np.uint16))
            states >>= full.astype(np.uint32) << 4
            quotients = (states / frequencies).astype(np.uint32)  # of float64: exact, rounded down
            states += quotients * (TOTAL - frequencies) + (shares & 0xFFFF)
    return states, np.concatenate(words[::-1])


def decode(states: States, words: Words, tables: npt.NDArray[np.uint8], steps: int, of: Tables) -> Symbols | None:
    """The matrix of symbols; None unless these states and words encode one."""
    columns, count = len(tables), len(states)
    states = states.copy()
    symbols = np.empty((steps, columns), np.int8)
    firsts = tables.astype(np.int32) * TOTAL
    used = 0
    for begin in range(0, columns, count):
        share = slice(begin, begin + count)
        for row in symbols[:, share]:
            slots = np.take(of.slots, firsts[share] + (states & (TOTAL - 1)).view(np.int32), mode="clip")
            states >>= _BITS
            states *= slots >> 20
            states += slots >> 8 & (TOTAL - 1)
            row[...] = (slots & 0xFF).astype(np.int16) - of.levels
            low = np.flatnonzero(states < _LOW)
            if used + len(low) > len(words):
                return None
            states[low] = states[low] << 16 | words[used : used + len(low)]
            used += len(low)
    return symbols if used == len(words) and (states == _LOW).all() else None
