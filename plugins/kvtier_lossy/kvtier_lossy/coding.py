"""A serializer that encodes half after half; the length of each code is known beforehand.

The encoded form, integers little-endian:

  0   4  "kvl" and the version, 1
  4   4  zeros
  8   8  bytes of the payload
 16      the code of each half: shard after shard, layer after layer, the keys before the values
"""

from __future__ import annotations

import abc
import struct
from collections.abc import Iterator, Mapping
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from kvtier_core.errors import BackendError
from kvtier_core.interfaces import Serializer
from kvtier_core.layouts import ChunkLayout
from kvtier_lossy.halves import CHANNELS, Half, Raw, halves_by_payload, refusal

HEADER = struct.Struct("<8sQ")
MAGIC = b"kvl\1\0\0\0\0"

Codes = npt.NDArray[np.uint8]
T = TypeVar("T")


class HalfByHalf(Serializer):
    """Keeps nothing between calls."""

    def __init__(self, name: str, layout: ChunkLayout, group: int):
        """Raises ConfigError unless ``group`` channels divide those of every half."""
        self._name = name
        self._halves = halves_by_payload(name, layout)
        self._group = group
        for channels in {half.length(CHANNELS) for each in self._halves.values() for half in each}:
            if channels % group:
                raise refusal(name, f"{channels} channels are not a multiple of {group}")

    @abc.abstractmethod
    def _nbytes(self, half: Half) -> int:
        """Bytes of the code of a half."""

    @abc.abstractmethod
    def _encode(self, half: Half, raw: Raw, into: Codes) -> None:
        """Write the code of these elements."""

    @abc.abstractmethod
    def _decode(self, half: Half, codes: Codes, raw: Raw) -> None:
        """Write the elements, whatever the code is."""

    def bound(self, layout: ChunkLayout) -> int:
        return HEADER.size + max(sum(map(self._nbytes, halves)) for halves in self._halves.values())

    def encode(self, payload: memoryview, into: memoryview) -> int:
        HEADER.pack_into(into, 0, MAGIC, len(payload))
        end = HEADER.size
        for half, code in self._codes(payload, into):
            self._encode(half, half.in_payload(payload), code)
            end += len(code)
        return end

    def decode(self, encoded: memoryview, into: memoryview) -> int:
        check_header(self._name, encoded, into)
        nbytes = HEADER.size + sum(map(self._nbytes, of_payload(self._name, self._halves, into)))
        if len(encoded) != nbytes:
            raise BackendError(f"{self._name}: {len(encoded)} encoded bytes do not match a payload of {len(into)}")
        with np.errstate(all="ignore"):  # of damaged scales
            for half, code in self._codes(into, encoded):
                self._decode(half, code, half.in_payload(into))
        return len(into)

    def _codes(self, payload: memoryview, encoded: memoryview) -> Iterator[tuple[Half, Codes]]:
        """Each half of a payload, and its code."""
        begin = HEADER.size
        for half in of_payload(self._name, self._halves, payload):
            nbytes = self._nbytes(half)
            yield half, np.frombuffer(encoded, np.uint8, nbytes, begin)
            begin += nbytes


def of_payload(name: str, by_nbytes: Mapping[int, T], payload: memoryview) -> T:
    """The value for payloads of this length. Raises BackendError if there is none."""
    if len(payload) not in by_nbytes:
        raise BackendError(f"{name}: no part of a chunk has {len(payload)} bytes")
    return by_nbytes[len(payload)]


def check_header(name: str, encoded: memoryview, payload: memoryview) -> None:
    """Raises BackendError unless a payload of this length is encoded there."""
    if len(encoded) < HEADER.size or HEADER.unpack_from(encoded) != (MAGIC, len(payload)):
        raise BackendError(f"{name}: encoded data does not match a payload of {len(payload)} bytes")
