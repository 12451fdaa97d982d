"""No serializer: a tier stores the arena's own bytes, and nothing is copied on the way."""

from __future__ import annotations

from typing import ClassVar

import attrs

from kvtier_core.interfaces import OpenContext, SerializerConfig


@attrs.frozen
class RawConfig(SerializerConfig):
    type: ClassVar[str] = "raw"

    def open(self, ctx: OpenContext) -> None:
        """Codec 0 of a frame is the absence of a serializer, so there is none to open."""
