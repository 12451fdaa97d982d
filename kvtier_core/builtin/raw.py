"""No serializer: a tier stores the bytes of the arena, and nothing is copied on the way."""

from __future__ import annotations

from typing import ClassVar

import attrs

from kvtier_core.interfaces import OpenContext, SerializerConfig


@attrs.frozen
class RawConfig(SerializerConfig):
    """The default: payloads are stored as they are."""

    type: ClassVar[str] = "raw"
    lossless: ClassVar[bool] = True

    def open(self, ctx: OpenContext) -> None:
        """Returns None: raw payloads need no serializer."""
