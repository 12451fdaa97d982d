"""The part of each frame that a worker reads directly: its own shard, if that can be read alone."""

from __future__ import annotations

from typing import NamedTuple, Self

import attrs

from kvtier_core.errors import BackendError
from kvtier_core.frames.format import FrameError, expected_header, shard_checksums_of, verify_checksums
from kvtier_core.frames.identity import codec_of_slots
from kvtier_core.layouts import ChunkLayout, Part
from kvtier_core.types import FRAME_ALIGNMENT, FRAME_HEADER_NBYTES, FrameRead, ReadStatus, StoredFrame


class FrameRange(NamedTuple):
    """A range of bytes of a frame."""

    frame: StoredFrame
    offset: int  #: in the frame, a multiple of `FRAME_ALIGNMENT`
    nbytes: int


@attrs.frozen
class OwnShard:
    """The shard of one rank; or all shards, if there is only one, or if the rank's shard is not aligned.

    It is read into slots with a separate layout: a header, then the shard.
    """

    layout: ChunkLayout  #: of these slots
    rank: int  #: of the worker, in this layout
    _part: Part  # of the stored frames
    _number: int | None  # of the shard in them; None: all shards

    @classmethod
    def of(cls, layout: ChunkLayout, rank: int) -> Self:
        """The shard of ``rank`` in chunks of one part."""
        (part,) = layout.parts
        shard = part.shard_of(rank)
        if len(part.shards) == 1 or not shard.nbytes or shard.offset % FRAME_ALIGNMENT:
            return cls(layout, rank, part, None)
        return cls(layout.alone(rank), 0, part, part.shards.index(shard))

    @property
    def nbytes(self) -> int:
        """Bytes that the checksum covers."""
        return self.layout.payload_nbytes

    def header(self, frame: StoredFrame) -> FrameRange:
        """The range of the frame's header."""
        return FrameRange(frame, 0, min(frame.location.nbytes, FRAME_HEADER_NBYTES))

    def range(self, frame: StoredFrame) -> FrameRange:
        """The range of the shard, rounded up to `FRAME_ALIGNMENT`, and at most what the slot and the frame hold."""
        offset = FRAME_HEADER_NBYTES if self._number is None else self._part.shards[self._number].offset
        room, behind = self.layout.frame_nbytes - FRAME_HEADER_NBYTES, max(0, frame.location.nbytes - offset)
        return FrameRange(frame, offset, min(room, behind))

    def examine(
        self, frame: StoredFrame, header: memoryview | BackendError, read: int | BackendError, checksum: int
    ) -> FrameRead:
        """Verify a header, and ``read`` bytes of the shard with this CRC-32, unless one of them could not be read."""
        if isinstance(header, BackendError):
            return FrameRead(ReadStatus.CORRUPT, str(header))
        if isinstance(read, BackendError):
            return FrameRead(ReadStatus.CORRUPT, str(read))
        if not header:
            return FrameRead(ReadStatus.MISSING)
        codec, nbytes = codec_of_slots(self.layout), self._part.payload_nbytes
        found = expected_header(header, frame.namespace, frame.key, codec=codec, payload_nbytes=nbytes)
        if isinstance(found, FrameError):
            return found.as_read()
        if read < self.nbytes:
            return FrameError.SHORT.as_read()
        if self._number is None:
            error = verify_checksums(found, checksum)
        elif len(checksums := shard_checksums_of(header)) != len(self._part.shards):
            error = FrameError.SHARDS
        else:
            error = None if checksums[self._number] == checksum else FrameError.CHECKSUM
        return error.as_read() if error else FrameRead(ReadStatus.VERIFIED, nbytes=frame.location.nbytes)
