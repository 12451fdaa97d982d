"""Slots whose shards are packed: when packing is worthwhile, and a serializer for their contents."""

from __future__ import annotations

import struct

import attrs

from kvtier_core import native
from kvtier_core.errors import BackendError
from kvtier_core.interfaces import Serializer
from kvtier_core.layouts import ChunkLayout, KVStructure
from kvtier_core.packed_form import packed_nbytes
from kvtier_core.transfer.packing import pack, payload_nbytes, unpack
from kvtier_core.work.buffers import Buffers

#: Instruction sets with which packing keeps up with a copy.
_FAST = ("avx512", "avx2")
_LENGTH = struct.Struct("<Q")


def why_not(layout: ChunkLayout) -> str:
    """Why shards of this layout should not be packed here; empty if they should."""
    if any(group.dtype != "bfloat16" or group.structure is KVStructure.OPAQUE for group in layout.groups):
        return "not all KV is in bfloat16"
    if native.extension is None or native.extension.packed_methods()[0] not in _FAST:
        return f"this processor cannot pack as fast as it copies; {' and '.join(_FAST)} can"
    longer = attrs.evolve(layout, packed=True).frame_nbytes >= layout.frame_nbytes
    return "chunks are too short to gain from it" if longer else ""


class OfUnpacked(Serializer):
    """Encodes the contents of packed shards with the serializer of a tier below them.

    The encoded form is followed by the length of each shard before packing, and by the number of shards (`_LENGTH`).
    """

    def __init__(self, serializer: Serializer, unpacked: ChunkLayout):
        """``unpacked``: the layout as the serializer knows it."""
        self._serializer = serializer
        self._layout = unpacked
        self._buffers = Buffers(unpacked.payload_nbytes)

    def bound(self, layout: ChunkLayout) -> int:
        return self._serializer.bound(self._layout) + (layout.shards + 1) * _LENGTH.size

    def encode(self, payload: memoryview, into: memoryview) -> int:
        pages, lengths, end = self._buffers.take(), [], 0
        while payload:
            nbytes = payload_nbytes(payload)
            if not unpack(payload[: packed_nbytes(nbytes)], pages[end : end + nbytes]):
                raise BackendError("a shard in a slot is not packed")
            payload, end = payload[packed_nbytes(nbytes) :], end + nbytes
            lengths.append(nbytes)
        encoded = self._serializer.encode(pages[:end], into)
        self._buffers.give_back([pages])
        tail = b"".join(map(_LENGTH.pack, (*lengths, len(lengths))))
        into[encoded : encoded + len(tail)] = tail
        return encoded + len(tail)

    def decode(self, encoded: memoryview, into: memoryview) -> int:
        encoded, lengths = _without_lengths(encoded)
        if sum(map(packed_nbytes, lengths)) != len(into):
            raise BackendError(f"shards do not match a payload of {len(into)} bytes")
        pages = self._buffers.take()
        if self._serializer.decode(encoded, pages[: sum(lengths)]) != sum(lengths):
            raise BackendError("it decodes to the wrong length")
        begin = end = 0
        for nbytes in lengths:
            shard = into[end : end + packed_nbytes(nbytes)]
            used = pack(pages[begin : begin + nbytes], shard)
            if not used:
                raise BackendError("decoded data does not fit in a packed shard")
            shard[used:] = bytes(len(shard) - used)
            begin, end = begin + nbytes, end + len(shard)
        self._buffers.give_back([pages])
        return end


def _without_lengths(encoded: memoryview) -> tuple[memoryview, list[int]]:
    """An encoded form, and the lengths after it. Raises BackendError."""
    try:
        (count,) = _LENGTH.unpack_from(encoded, len(encoded) - _LENGTH.size)
        begin = len(encoded) - (count + 1) * _LENGTH.size
        return encoded[:begin], list(struct.unpack_from(f"<{count}Q", encoded, begin))
    except (struct.error, OverflowError) as error:
        raise BackendError("shard lengths are missing") from error
