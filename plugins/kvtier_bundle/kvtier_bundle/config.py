"""The settings of a tier that reads a bundle."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import ClassVar

import attrs

from kvtier_core.interfaces import Backend, BackendConfig, OpenContext, Stored


@attrs.frozen
class BundleConfig(BackendConfig):
    """The frames in a bundle, which is never changed. Any number of engines may read it."""

    type: ClassVar[str] = "bundle"
    shared: ClassVar[bool] = True
    read_only: ClassVar[bool] = True

    path: Path  #: the file, which only root and the engine's user may be able to write to

    def open(self, ctx: OpenContext) -> Backend:
        from kvtier_bundle.backend import BundleBackend

        return BundleBackend(self.path, ctx.namespace)

    def walk(self) -> AbstractContextManager[Iterator[Stored]]:
        from kvtier_bundle.backend import everything_in

        return everything_in(self.path)
