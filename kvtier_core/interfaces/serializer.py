"""An encoding of the payloads that a tier stores."""

from __future__ import annotations

import abc
from typing import ClassVar

import attrs

from kvtier_core.interfaces.context import OpenContext
from kvtier_core.types import ChunkLayout


class Serializer(abc.ABC):
    """Encodes payloads at a tier's door. Its code is written in every frame."""

    code: ClassVar[int]  #: 1 … 65535, stable for ever; 0 is raw
    lossless: ClassVar[bool]

    @abc.abstractmethod
    def bound(self, layout: ChunkLayout) -> int:
        """The most bytes that an encoded payload can have."""

    @abc.abstractmethod
    def encode(self, payload: memoryview, into: memoryview) -> int:
        """Bytes written to ``into``."""

    @abc.abstractmethod
    def decode(self, encoded: memoryview, into: memoryview) -> int:
        """Bytes written to ``into``; raises BackendError on what it cannot decode."""


@attrs.frozen
class SerializerConfig(abc.ABC):
    type: ClassVar[str]

    @abc.abstractmethod
    def open(self, ctx: OpenContext) -> Serializer | None:
        """None: frames are stored as they are."""
