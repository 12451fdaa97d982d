"""The config of an S3 tier."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import ClassVar

import attrs

from kvtier_core.interfaces import Backend, BackendConfig, OpenContext, Stored
from kvtier_core.types import Nbytes
from kvtier_s3.settings import S3Settings


@attrs.frozen
class S3Config(S3Settings, BackendConfig):
    """One object per frame, in a bucket that any number of engines share."""

    type: ClassVar[str] = "s3"
    shared: ClassVar[bool] = True

    def open(self, ctx: OpenContext) -> Backend:
        from kvtier_s3.opening import open_backend

        return open_backend(self, ctx)

    def walk(self) -> AbstractContextManager[Iterator[Stored]]:
        from kvtier_s3.walk import everything_in

        return everything_in(self)

    def recount(self, capacity: Nbytes) -> None:
        from kvtier_s3.walk import recount_bucket

        recount_bucket(self)  # counted again: others may have written since these bytes were counted
