"""The config of a Mooncake tier."""

from __future__ import annotations

from typing import ClassVar

import attrs

from kvtier_core.interfaces import Backend, BackendConfig, OpenContext
from kvtier_mooncake.settings import MooncakeSettings


@attrs.frozen
class MooncakeConfig(MooncakeSettings, BackendConfig):
    """Frames in Mooncake Store, the memory of a cluster: shared by all engines that name the same master and prefix."""

    type: ClassVar[str] = "mooncake"
    shared: ClassVar[bool] = True

    def open(self, ctx: OpenContext) -> Backend:
        from kvtier_mooncake.backend import MooncakeBackend

        return MooncakeBackend(self, ctx)
