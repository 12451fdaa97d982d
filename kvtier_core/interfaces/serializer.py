"""An encoding of the payloads that a store tier keeps."""

from __future__ import annotations

import abc
from typing import ClassVar

import attrs

from kvtier_core.interfaces.context import OpenContext
from kvtier_core.layouts import ChunkLayout


class Serializer(abc.ABC):
    """Encodes the payloads of frames for one store tier, and decodes them.

    A tier opens one serializer. All of the tier's I/O threads call ``encode`` and ``decode`` on it at the same time, so
    neither may keep anything in the instance between calls, or share a buffer or a library's context, without a lock.
    Any instance decodes the frames of any other: opened from an equal config, in another process, after a restart.
    ``decode`` returns the same bytes for the same input, every time.

    A payload is that of one part of the layout, so payloads have several lengths. Views may begin anywhere in memory;
    those of a stack begin at multiples of `FRAME_ALIGNMENT`, which suits vector instructions. What else a call needs it
    allocates, or takes from a `kvtier_core.transfer.buffers.Buffers` of the instance, which any thread may use: new
    memory of a frame's length costs more than most encodings.

    Every frame carries the identity of its codec, which the core derives from the `SerializerConfig`, and checksums of
    the payload before and after decoding. A decoder that disagrees with them is found, and its output is not served.
    """

    @abc.abstractmethod
    def bound(self, layout: ChunkLayout) -> int:
        """The most bytes that an encoded payload can have, for any payload of this layout."""

    @abc.abstractmethod
    def encode(self, payload: memoryview, into: memoryview) -> int:
        """Encode ``payload`` to the beginning of ``into`` and return how many bytes that took.

        ``into`` has at least `bound` bytes, with any content, and does not overlap ``payload``. Changes nothing else
        and keeps no view. Raises BackendError; then the chunk is not stored in this tier.
        """

    @abc.abstractmethod
    def decode(self, encoded: memoryview, into: memoryview) -> int:
        """Decode to the beginning of ``into``, which is as long as the payload, and return how many bytes that took.

        Keeps no view. Raises BackendError for input that it cannot decode; any bytes may come in, so no length that
        they state is allocated before it is verified. Whatever it raises, the frame is a miss, and the others of its
        batch are not.
        """


@attrs.frozen
class SerializerConfig(abc.ABC):
    """Names a codec and its options, and opens its serializer.

    Type, ``format_version`` and the values of all fields are the codec's identity: frames that were written under
    another identity are a miss. So whatever changes the encoding must be a field, or change ``format_version``.
    """

    #: The name that users write; at most 64 bytes. It goes into every frame and never changes.
    type: ClassVar[str]
    #: True if decoding always returns the very bits that were encoded, NaN payloads included. If False, chunks that
    #: come up from the tier are served, and never written to another tier. A property where it depends on the options.
    lossless: ClassVar[bool]
    #: To be raised by each release that encodes otherwise with the same options, or reads old encodings otherwise.
    format_version: ClassVar[int] = 1
    #: By how much KV in bfloat16 becomes shorter, for `kvtier simulate` and `plan` alone; or a property.
    typical_ratio: ClassVar[float] = 1.0

    @abc.abstractmethod
    def open(self, ctx: OpenContext) -> Serializer | None:
        """The serializer of one tier, or None to store payloads as they are. Raises BackendError or ConfigError."""
