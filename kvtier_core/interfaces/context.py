"""The context in which a Config opens a tier."""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

import attrs

from kvtier_core.layouts import ChunkLayout
from kvtier_core.types import ChunkKey, Namespace, Nbytes, Seconds


class Medium(enum.Enum):
    """The medium of a tier, for the engine's metrics of hit sources."""

    HOST = "host"  #: memory of this node
    DISK = "disk"  #: a disk of this node
    UNSPECIFIED = "unspecified"  #: anything else, for example a remote store


@attrs.frozen
class KeyChanges:
    """The changes of the keys of a `StoredFrames`. No key is in both collections."""

    come: Collection[ChunkKey]
    gone: Collection[ChunkKey]
    position: int  #: of the changes that follow
    is_complete: bool  #: are all keys in ``come``, whatever was known before?


class StoredFrames(Protocol):
    """The frames in a private store tier, for the threads of a tier of peers: any may call any method."""

    def changes(self, position: int) -> KeyChanges:
        """The changes since this position; all keys if that is 0, or too long ago."""

    def frame(self, key: ChunkKey) -> AbstractContextManager[memoryview | None]:
        """Read a frame, and verify it. Its memory stays until the end of the context.

        None if it is missing or damaged, or cannot be read now. Waits for the store, but only for a moment if the
        maximum number of frames is in use.
        """


@attrs.frozen
class OpenContext:
    """The environment in which the stack opens a plugin."""

    #: The namespace of the frames: the engine's; for a shared store with the codec and seal key id, if any, as facts.
    namespace: Namespace
    layout: ChunkLayout
    #: This engine's share of the tier's capacity in YAML, in bytes of frames. The tier keeps its own frames within it;
    #: a private store deletes frames of other namespaces that would exceed it. For a shared store: the capacity that
    #: all of its users share, or 0 if the store limits itself.
    capacity: Nbytes = Nbytes(0)
    replica: int = 0  #: this engine's index among those that share the configuration (data parallelism), from 0
    replicas: int = 1  #: the number of such engines; none may touch the frames of another
    max_frame_nbytes: Nbytes = Nbytes(0)  #: upper bound of the frames that this tier writes; 0: unknown
    #: Bytes of a slot of an arena. The arena's codec decides; by default frames are there as the engine has them.
    slot_nbytes: int = attrs.field(default=attrs.Factory(lambda self: self.layout.frame_nbytes, takes_self=True))
    #: For each shard of the layout, the NUMA node of the devices that copy it. None: unknown, several nodes, or a
    #: machine with one node. Empty: all unknown.
    numa_nodes: tuple[int | None, ...] = ()
    timeout: Seconds = Seconds(5)  #: a call to a store tier should give up after this and raise BackendError
    #: The folder, on a file system in memory, in which an arena's memory outlives this process (`SupportsKeeping`).
    #: None: it does not.
    keep: Path | None = None
    #: It is a trial, of which only the outcome counts: make, change and remove nothing that others could find.
    checking: bool = False
    #: For a tier of peers: the sealed frames in the hottest arena, for any thread to read. Their memory may be reused
    #: at any moment: a copy counts only if its key still maps to the same view (``is``) when it is complete.
    sealed: Mapping[ChunkKey, memoryview] = attrs.field(factory=dict, eq=False, repr=False)
    #: For a tier of peers: append the key of a frame of ``sealed``, on any thread, when another engine has copied it.
    copied: deque[ChunkKey] = attrs.field(factory=deque, eq=False, repr=False)
    #: For a tier of peers: the frames in this engine's private store tiers that have neither a serializer nor a keyed
    #: seal. Tiers that are opened later are added.
    stored: Sequence[StoredFrames] = attrs.field(factory=list, eq=False, repr=False)
