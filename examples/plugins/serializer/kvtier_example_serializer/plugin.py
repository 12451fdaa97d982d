"""Compresses what a store tier keeps, with zlib."""

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

    level: int = attrs.field(default=1, validator=[attrs.validators.ge(1), attrs.validators.le(9)])

    def open(self, ctx: OpenContext) -> Serializer:
        return ExampleSerializer(self.level)


class ExampleSerializer(Serializer):
    def __init__(self, level: int) -> None:
        self._level = level

    def bound(self, layout: ChunkLayout) -> int:
        # What cannot be shrunk is stored as it is, in blocks with a header.
        return layout.payload_nbytes + layout.payload_nbytes // 1000 + 64

    def encode(self, payload: memoryview, into: memoryview) -> int:
        encoded = zlib.compress(payload, self._level)
        into[: len(encoded)] = encoded
        return len(encoded)

    def decode(self, encoded: memoryview, into: memoryview) -> int:
        decoder = zlib.decompressobj()
        try:
            payload = decoder.decompress(encoded, len(into))
        except zlib.error as error:
            raise BackendError(f"example-serializer: {error}") from error
        into[: len(payload)] = payload
        return len(payload)


@hookimpl
def kvtier_serializers() -> list[type[SerializerConfig]]:
    return [ExampleSerializerConfig]
