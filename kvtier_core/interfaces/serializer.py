"""An encoding of the payloads that a store tier keeps."""

from __future__ import annotations

import abc
from typing import ClassVar

import attrs

from kvtier_core.interfaces.context import OpenContext
from kvtier_core.layouts import ChunkLayout


class Serializer(abc.ABC):
    """Encodes and decodes the payloads of frames for one store tier.

    A tier opens one serializer. All of its I/O threads call ``encode`` and ``decode`` at the same time, so neither may
    keep state in the instance between calls, or share a buffer or a library's context, without a lock. Any instance
    decodes the frames of any other opened from an equal config, in another process or after a restart. ``decode``
    always returns the same bytes for the same input.

    A payload is that of one part of the layout, so payloads have several lengths. Views may begin at any address; those
    of a stack are aligned to `FRAME_ALIGNMENT`, which suits vector instructions. A call allocates other memory that it
    needs, or takes it from a `kvtier_core.work.buffers.Buffers` of the instance, which any thread may use:
    allocating a frame's length costs more than most encodings.

    Every frame carries the identity of its codec, which the core derives from the `SerializerConfig`, and checksums of
    the payload before and after decoding. Output that does not match them is not served.
    """

    @abc.abstractmethod
    def bound(self, layout: ChunkLayout) -> int:
        """The most bytes that an encoded payload of this layout can have."""

    @abc.abstractmethod
    def encode(self, payload: memoryview, into: memoryview) -> int:
        """Encode ``payload`` to the beginning of ``into`` and return the length in bytes.

        ``into`` has at least `bound` bytes, with any content, and does not overlap ``payload``. Changes nothing else
        and keeps no view. Raises BackendError; then the chunk is not stored in this tier.
        """

    @abc.abstractmethod
    def decode(self, encoded: memoryview, into: memoryview) -> int:
        """Decode to the beginning of ``into``, which has the length of the payload, and return the length in bytes.

        Keeps no view. Raises BackendError for input that it cannot decode. The input may be any bytes: verify a length
        in it before allocating that much. If it raises anything, only this frame is a miss.
        """


@attrs.frozen
class SerializerConfig(abc.ABC):
    """Names a codec and its options, and opens its serializer.

    Type, ``format_version`` and the values of all fields are the codec's identity: frames of another identity are a
    miss. Anything that changes the encoding must therefore be a field, or change ``format_version``.
    """

    #: The name in ``tiers[].serializer``; at most 64 bytes. It is part of every frame and never changes.
    type: ClassVar[str]
    #: True if decoding always returns the encoded bits, NaN payloads included. If False, promoted chunks are served
    #: but never written to another tier. A property if it depends on the options.
    lossless: ClassVar[bool]
    #: Increase it in each release that encodes differently with the same options, or decodes old frames differently.
    format_version: ClassVar[int] = 1
    #: Compression ratio of KV in bfloat16, for `kvtier simulate` and `plan` only; or a property.
    typical_ratio: ClassVar[float] = 1.0

    @abc.abstractmethod
    def open(self, ctx: OpenContext) -> Serializer | None:
        """The serializer of one tier, or None to store payloads as they are. Raises BackendError or ConfigError."""
