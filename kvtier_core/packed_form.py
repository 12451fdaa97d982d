"""Lengths of packed shards and payloads; csrc/packed.h has their form, transfer/packing.py makes it."""

from __future__ import annotations

from typing import NamedTuple

from kvtier_core.types import FRAME_ALIGNMENT

#: For a packed payload: bytes of its header, of the head of each tile, and of a tile before it is packed.
HEADER_NBYTES, HEAD_NBYTES, TILE_NBYTES = 64, 32, 4096
#: A packed shard has room for one raw tile in this many.
_TILES_FOR_A_RAW_ONE = 16


class PackedForm(NamedTuple):
    """The places of the parts of a packed payload; csrc/packed.h has their content."""

    values: int  #: in tiles
    rest: int  #: bytes of the payload after the tiles
    bodies: int  #: offset of the bodies of the tiles
    ends: int  #: offset of the ends of raw tiles

    @classmethod
    def of(cls, nbytes: int) -> PackedForm:
        """The form of a payload of this length."""
        values = nbytes // 256 * 128
        heads = -(-2 * values // TILE_NBYTES) * HEAD_NBYTES
        bodies = HEADER_NBYTES + -(-heads // 64) * 64
        return cls(values, nbytes - 2 * values, bodies, bodies + values * 3 // 2 + nbytes - 2 * values)

    @property
    def bound(self) -> int:
        """Upper bound of its length: no tile can be packed."""
        return self.ends + self.values // 2


def packed_nbytes(nbytes: int) -> int:
    """Bytes of a packed shard with this many bytes of pages."""
    if not nbytes:
        return 0
    form = PackedForm.of(nbytes)
    raw = -(-2 * form.values // (_TILES_FOR_A_RAW_ONE * TILE_NBYTES))
    return -(-(form.ends + raw * TILE_NBYTES // 4) // FRAME_ALIGNMENT) * FRAME_ALIGNMENT
