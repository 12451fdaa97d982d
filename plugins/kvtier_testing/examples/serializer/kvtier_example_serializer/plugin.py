"""Compresses what a store tier keeps: zlib on the upper bytes of KV in 16 bits. The lower ones are noise, and stay."""

from __future__ import annotations

import zlib
from typing import ClassVar

import attrs

from kvtier_core.errors import BackendError
from kvtier_core.hookspecs import hookimpl
from kvtier_core.interfaces import OpenContext, Serializer, SerializerConfig
from kvtier_core.layouts import ChunkLayout


@attrs.frozen
class ExampleSerializerConfig(SerializerConfig):
    type: ClassVar[str] = "example-serializer"  # what users write in YAML; the fields are further keys
    lossless: ClassVar[bool] = True
    typical_ratio: ClassVar[float] = 1.37  # of KV in bfloat16; kvtier plan and simulate use it

    level: int = attrs.field(default=1, validator=[attrs.validators.ge(1), attrs.validators.le(9)])

    def open(self, ctx: OpenContext) -> Serializer:
        return ExampleSerializer(self.level)


class ExampleSerializer(Serializer):
    def __init__(self, level: int) -> None:
        self._level = level

    def bound(self, layout: ChunkLayout) -> int:
        # What cannot be compressed is stored as it is, in blocks with a header.
        return layout.payload_nbytes + layout.payload_nbytes // 1000 + 64

    def encode(self, payload: memoryview, into: memoryview) -> int:
        content = bytes(payload)  # slices of a memoryview with a step are slow
        encoded = content[::2] + zlib.compress(content[1::2], self._level)
        into[: len(encoded)] = encoded
        return len(encoded)

    def decode(self, encoded: memoryview, into: memoryview) -> int:
        lower = (len(into) + 1) // 2
        decoder = zlib.decompressobj()
        try:  # never more than there is room for, whatever the bytes say
            upper = decoder.decompress(encoded[lower:], len(into) // 2)
        except zlib.error as error:
            raise BackendError(f"example-serializer: {error}") from error
        if len(encoded) < lower or len(upper) < len(into) // 2:
            raise BackendError(f"example-serializer: encoded data does not match a payload of {len(into)} bytes")
        payload = bytearray(len(into))
        payload[::2], payload[1::2] = encoded[:lower], upper
        into[:] = payload
        return len(into)


@hookimpl
def kvtier_serializers() -> list[type[SerializerConfig]]:
    return [ExampleSerializerConfig]
