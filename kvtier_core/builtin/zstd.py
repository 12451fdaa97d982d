"""`serializer: zstd`: a lossless codec of varying length: Zstandard (RFC 8878) on separated bytes of numbers.

In KV the upper bytes of numbers, with most of the exponent, are alike, and the lower ones are noise. A *plane* has one
byte of each number: the first plane the lowest, the next the second. Zstandard codes each plane separately; one whose
beginning hardly shrinks is kept as it is. The layout determines the length of a number: one byte if groups differ.

The encoded form, integers little-endian:

    0     4  "kvz" and the version, 1
    4     4  length of a number
    8     8  length of the payload
   16   8 n  for each plane, its length here; with its full length it is not coded
             the planes
             the bytes of the payload after the last whole number
"""

from __future__ import annotations

import struct
from types import ModuleType
from typing import ClassVar

import attrs

from kvtier_core.errors import BackendError
from kvtier_core.interfaces import OpenContext, Serializer, SerializerConfig
from kvtier_core.layouts import ChunkLayout

_HEADER = struct.Struct("<4sIQ")
_MAGIC = b"kvz\1"
#: Bytes of a number, by torch's name of its type; one byte for other types.
_WIDTHS = {"bfloat16": 2, "float16": 2, "float32": 4}
#: A plane is coded if a sample of this length, its beginning, shrinks by a fiftieth. Coding the mantissas of KV would
#: save 0.5 %, and take as much time as coding the exponents.
_SAMPLE_NBYTES, _WORTH_IT = 64 << 10, 0.98


@attrs.frozen
class ZstdConfig(SerializerConfig):
    """For disks and networks: shorter than `packed`, and slower. Needs kvtier[zstd]."""

    type: ClassVar[str] = "zstd"
    lossless: ClassVar[bool] = True
    typical_ratio: ClassVar[float] = 1.44

    #: The compression level of Zstandard. Higher levels take longer, and make KV no shorter.
    level: int = attrs.field(default=1, validator=[attrs.validators.ge(-7), attrs.validators.le(19)])

    def open(self, ctx: OpenContext) -> Zstd:
        try:
            import zstandard
        except ImportError as error:
            raise BackendError(f"{error}; pip install 'kvtier[zstd]'") from error
        widths = {_WIDTHS.get(group.dtype, 1) for group in ctx.layout.groups}
        return Zstd(zstandard, self.level, widths.pop() if len(widths) == 1 else 1)


class Zstd(Serializer):
    """Each call creates its own contexts, because only one thread at a time may use a context of Zstandard."""

    def __init__(self, zstandard: ModuleType, level: int, width: int):
        self._zstandard = zstandard
        self._level = level
        self._width = width

    def bound(self, layout: ChunkLayout) -> int:
        return _HEADER.size + 8 * self._width + layout.payload_nbytes

    def encode(self, payload: memoryview, into: memoryview) -> int:
        numbers = bytes(payload[: len(payload) // self._width * self._width])
        planes = [self._coded(numbers[i :: self._width]) for i in range(self._width)]
        head = _HEADER.pack(_MAGIC, self._width, len(payload)) + struct.pack(f"<{self._width}Q", *map(len, planes))
        end = 0
        pieces: list[bytes | memoryview] = [head, *planes, payload[len(numbers) :]]
        for piece in pieces:
            into[end : end + len(piece)] = piece
            end += len(piece)
        return end

    def _coded(self, plane: bytes) -> bytes:
        compressor = self._zstandard.ZstdCompressor(level=self._level)
        sample = plane[:_SAMPLE_NBYTES]
        if len(compressor.compress(sample)) > len(sample) * _WORTH_IT:
            return plane
        coded = compressor.compress(plane)
        return coded if len(coded) < len(plane) else plane

    def decode(self, encoded: memoryview, into: memoryview) -> int:
        try:
            magic, width, nbytes = _HEADER.unpack_from(encoded)
            lengths = struct.unpack_from(f"<{self._width}Q", encoded, _HEADER.size)
        except struct.error as error:
            raise BackendError("zstd: encoded data is too short") from error
        begin, count = _HEADER.size + 8 * self._width, len(into) // self._width
        rest = len(into) % self._width
        if (magic, width, nbytes) != (_MAGIC, self._width, len(into)) or begin + sum(lengths) + rest != len(encoded):
            raise BackendError(f"zstd: encoded data does not match a payload of {len(into)} bytes")
        numbers = bytearray(count * width)
        for i, length in enumerate(lengths):
            numbers[i::width] = self._decoded(encoded[begin : begin + length], count)
            begin += length
        into[: len(numbers)] = numbers
        into[len(numbers) :] = encoded[begin:]
        return len(into)

    def _decoded(self, plane: memoryview, count: int) -> bytes | memoryview:
        if len(plane) == count:
            return plane
        zstandard = self._zstandard
        try:  # the decoder allocates the length that a frame states
            if zstandard.frame_content_size(plane) != count:
                raise BackendError("zstd: a plane has the wrong length")
            decoded: bytes = zstandard.ZstdDecompressor().decompress(plane)
        except zstandard.ZstdError as error:
            raise BackendError(f"zstd: {error}") from error
        return decoded
