"""The config of a tier of peers."""

from __future__ import annotations

from typing import ClassVar

import attrs

from kvtier_core.interfaces import Backend, BackendConfig, OpenContext
from kvtier_peers.settings import PeersSettings


@attrs.frozen
class PeersConfig(PeersSettings, BackendConfig):
    """Frames of other engines: each shows the others what its hottest arena and its private stores hold."""

    type: ClassVar[str] = "peers"
    shared: ClassVar[bool] = True
    of_peers: ClassVar[bool] = True
    read_only: ClassVar[bool] = True

    def open(self, ctx: OpenContext) -> Backend:
        from kvtier_peers.backend import PeersBackend

        return PeersBackend(self, ctx)
