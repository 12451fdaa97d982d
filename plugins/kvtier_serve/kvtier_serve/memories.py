"""The memory of each arena of a server: opened once, divided among its stacks, and perhaps kept for the next server."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import cast

import attrs

from kvtier_core.config.model import ArenaTierConfig, StackConfig
from kvtier_core.config.open import open_arena
from kvtier_core.errors import BackendError, ConfigError
from kvtier_core.interfaces import AllocatorBackend, OpenContext, SupportsKeeping, SupportsSharing
from kvtier_core.layouts import ChunkLayout, KVGroup, KVKind, KVStructure
from kvtier_core.stack.manager import in_words
from kvtier_core.storekit.folder import file_system_of, folders, nearest, place_in
from kvtier_core.storekit.folder_lock import FolderLock
from kvtier_core.types import FRAME_ALIGNMENT, Namespace, Nbytes
from kvtier_remote import user_locks
from kvtier_remote.guarded_memory import GuardedMemory
from kvtier_serve.extents import Extents, Share
from kvtier_serve.kept.journal import Journal, room_for_journal

logger = logging.getLogger("kvtier")


class SharedMemory(AllocatorBackend, SupportsSharing):
    """What an arena that can be shared has."""


@attrs.frozen
class Memory:
    """The memory of one arena of the file."""

    tier: ArenaTierConfig
    backend: SharedMemory
    extents: Extents
    mapped: GuardedMemory
    journal: Journal | None = None  #: if it outlives the server
    #: Parts of which nothing is adopted; each with what records that no process touches it any more.
    formers: list[tuple[Share, Callable[[], None]]] = attrs.field(factory=list)

    @property
    def nbytes(self) -> int:
        """Length of the file that engines map."""
        return len(self.mapped)

    @property
    def kept(self) -> Journal:
        """The journal of memory that outlives the server."""
        assert self.journal is not None, "it ends with the server"
        return self.journal

    def is_used_by_others(self, boot: int) -> bool:
        """May processes touch it because a server of another boot has lent it to them?"""
        return self.journal is not None and user_locks.used_by_others(self.backend.descriptor, boot)

    def close(self) -> None:
        """May be called twice."""
        self.backend.close()
        if self.journal is not None:
            self.journal.close()


def check(config: StackConfig) -> list[str]:
    """The description that a server would give. Memory that is kept stays as it is. Raises ConfigError."""
    with contextlib.ExitStack() as closing:
        lock_private(config, FolderLock.try_out)
        memories = [open_memory(config, number, b"", closing, checking=True) for number, _ in enumerate(config.arenas)]
        return described(config, memories)


def described(config: StackConfig, memories: Iterable[Memory]) -> list[str]:
    lines = []
    for memory in memories:
        lines.append(f"{memory.tier.name}: {'; '.join([f'{memory.tier.capacity}', *in_words(memory.backend.facts())])}")
    return lines + [f"{tier.name}: opens when the first engine connects" for tier in config.stores]


def lock_private(config: StackConfig, lock: Callable[[FolderLock], object]) -> dict[str, list[FolderLock]]:
    """Lock the folders of stores that take only one namespace, by the name of the tier. Raises ConfigError."""
    locks: dict[str, list[FolderLock]] = {}
    for tier in config.stores:
        private = tier.required and not tier.config.shared
        for folder in filter(os.path.isdir, folders(tier)) if private else ():
            try:
                lock(lock_of_it := FolderLock(folder))
            except (OSError, BackendError) as error:
                raise ConfigError([config.problem(config.path_of(config.tiers.index(tier)), str(error))]) from error
            locks.setdefault(tier.name, []).append(lock_of_it)
    return locks


def open_memory(
    config: StackConfig, number: int, tenants_key: bytes, closing: contextlib.ExitStack, *, checking: bool = False
) -> Memory:
    """Allocate the memory of an arena, or find it, and map it."""
    tier = config.arenas[number]
    try:
        keep = tier.keep and place_in(tier.keep)
        journal = None
        if keep is not None:
            _must_be_a_place_for_memory(keep, tier.capacity)
            if checking:
                FolderLock(keep).try_out()
            else:
                journal = Journal(keep, tenants_key)
                closing.callback(journal.close)
        backend = _open_shared(config, tier, keep, closing, checking=checking)
        mapped = GuardedMemory(backend.descriptor)
        memory = Memory(tier, backend, Extents(mapped, backend.slots * backend.slot_nbytes), mapped, journal)
        if journal is not None and not journal.begin(os.fstat(backend.descriptor).st_ino):
            memory.formers.append((memory.extents.whole(), journal.resume))
    except (OSError, BackendError) as error:
        why = f"cannot get its memory: {error}"
        raise ConfigError([config.problem(tier.source.path, why)]) from error
    return memory


def _open_shared(
    config: StackConfig, tier: ArenaTierConfig, keep: Path | None, closing: contextlib.ExitStack, *, checking: bool
) -> SharedMemory:
    """The memory of an arena, in the folder ``keep`` if there is one. Raises ConfigError if engines cannot map it."""
    number = config.tiers.index(tier)
    page = KVGroup("memory", KVKind.FULL_ATTENTION, (FRAME_ALIGNMENT,), 1, "uint8", KVStructure.OPAQUE)
    ctx = OpenContext(Namespace.of({}), ChunkLayout([page], 1), tier.capacity, keep=keep, checking=checking)
    memory = open_arena(config, number, ctx, closing)
    if not isinstance(memory, SupportsSharing):
        why = f"the memory of {tier.source.plugin} cannot be shared with other processes (SupportsSharing)"
        raise ConfigError([config.problem(config.path_of(number), why)])
    if keep is not None and not (isinstance(memory, SupportsKeeping) and memory.kept):
        why = f"the memory of {tier.source.plugin} cannot outlive the server (SupportsKeeping)"
        raise ConfigError([config.problem(f"{config.path_of(number)}.keep", why, "remove it")])
    return cast(SharedMemory, memory)


def _must_be_a_place_for_memory(keep: Path, capacity: int) -> None:
    """Raise OSError or BackendError if a folder cannot keep memory of this capacity and its journal."""
    if (kind := file_system_of(keep.resolve())) != "tmpfs":
        raise BackendError(f"{keep} is not in memory but on a file system of type {kind}; name a folder on a tmpfs")
    system = os.statvfs(nearest(keep))
    held = sum(512 * each.stat().st_blocks for each in keep.glob("*"))  # by a former server
    room, needed = Nbytes(system.f_bavail * system.f_frsize + held), Nbytes(capacity + room_for_journal(capacity))
    if system.f_blocks and needed > room:  # a tmpfs without a bound has none
        raise BackendError(
            f"{capacity} and {room_for_journal(capacity)} for the journal do not fit in {keep}, where {room} is "
            "left; lower the capacity, or enlarge the tmpfs (mount -o remount,size=…)"
        )


def claim_all(memory: Memory) -> dict[int, Share]:
    """The share that each stack had of a kept memory, by the number of the space."""
    if memory.journal is None:
        return {}
    try:
        return _claimed(memory, memory.journal.spaces)
    except BackendError as error:
        logger.warning("kvtier: the content of the memory of %s is lost: %s", memory.tier.name, error)
        memory.journal.forget()
        memory.formers.append((memory.extents.whole(), memory.journal.resume))
        return {}


def _claimed(memory: Memory, numbers: Iterable[int]) -> dict[int, Share]:
    """The shares of these stacks. Raises BackendError."""
    shares = {}
    for number in numbers:
        kept = memory.kept.spaces[number]
        shares[number] = Share(memory.extents, kept.slot_nbytes, kept.opening.model)
        shares[number].claim(kept.slots)
    return shares
