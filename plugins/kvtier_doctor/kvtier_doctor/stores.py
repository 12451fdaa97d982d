"""The stores of a file's tiers, for commands that list their frames, or open them and leave nothing behind."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from kvtier_core.config.load import load_config
from kvtier_core.config.model import StackConfig, StoreTierConfig
from kvtier_core.config.open import OpenedTier, open_keyed_seal, open_tier
from kvtier_core.config.registry import Registry
from kvtier_core.errors import BackendError
from kvtier_core.interfaces import OpenContext, Stored, SupportsNamespaces, SupportsWalk
from kvtier_core.layouts import ChunkLayout, is_marked
from kvtier_core.storekit.folder import folders
from kvtier_core.storekit.folder_lock import remove_if_unused
from kvtier_core.types import Namespace


def store_tier(file: str, name: str) -> StoreTierConfig:
    """The store tier of this name. Raises ConfigError, and BackendError if the file has none."""
    tiers = {tier.name: tier for tier in load_config(file, Registry.discover()).stores}
    if name not in tiers:
        raise BackendError(f"{file} has no tier {name!r} below its arenas; it has: {', '.join(tiers) or 'none'}")
    return tiers[name]


def walk(tier: StoreTierConfig) -> contextlib.AbstractContextManager[Iterator[Stored]]:
    """Everything in the store of a tier; see `SupportsWalk`. Raises BackendError."""
    if not isinstance(tier.config, SupportsWalk):
        raise BackendError(f"a tier of type {tier.config.type} cannot list its frames")
    return tier.config.walk()


def tenant_frames(tier: StoreTierConfig, mark: bytes) -> Callable[[Stored], bool]:
    """Says of a frame whether the tenant with this mark has stored it; of each if it is empty. Raises BackendError."""
    seal = open_keyed_seal(tier) if mark else None

    def is_of_tenant(stored: Stored) -> bool:
        keys = [stored.key] if stored.key else []
        return not mark or any(is_marked(key, mark) for key in (seal.keys(keys) if seal else keys))

    return is_of_tenant


@contextlib.contextmanager
def opened(config: StackConfig, layout: ChunkLayout, number: int) -> Iterator[OpenedTier]:
    """A tier by its number, opened as an engine would, in a unique namespace, of which nothing remains.

    The caller deletes the frames that it writes. Raises ConfigError.
    """
    ctx = OpenContext(Namespace.of({"check": secrets.token_hex(16)}), layout)
    with _no_new_folders(folders(config.tiers[number])), open_tier(config, number, ctx) as tier:
        try:
            yield tier
        finally:
            if isinstance(tier.store, SupportsNamespaces):
                with contextlib.suppress(BackendError):  # a store that cannot be reached does not know the namespace
                    tier.store.drop_namespace()


@contextlib.contextmanager
def _no_new_folders(paths: Iterable[Path]) -> Iterator[None]:
    """Remove the folders that were not there before, and are empty at the end."""
    missing = [each for path in paths for each in (path, *path.parents) if not os.path.exists(each)]
    try:
        yield
    finally:
        for folder in missing:
            with contextlib.suppress(OSError, BackendError):  # in use now
                remove_if_unused(folder)
