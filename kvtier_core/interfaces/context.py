"""The context in which a Config opens a tier."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from pathlib import Path

import attrs

from kvtier_core.layouts import ChunkLayout
from kvtier_core.types import ChunkKey, Namespace, Nbytes, Seconds


class Medium(enum.Enum):
    """The medium of a tier, for the engine's metrics of hit sources."""

    HOST = "host"  #: memory of this node
    DISK = "disk"  #: a disk of this node
    UNSPECIFIED = "unspecified"  #: anything else, for example a remote store


@attrs.frozen
class OpenContext:
    """The environment in which the stack opens a plugin."""

    #: The namespace of the frames: the engine's; for a shared store with the codec and seal key id, if any, as facts.
    namespace: Namespace
    layout: ChunkLayout
    #: This engine's share of the tier's capacity in YAML, in bytes of frames. The tier keeps its own frames within it;
    #: a private store deletes frames of other namespaces that would exceed it. For a shared store: the capacity that
    #: all of its users share, or 0 if the store bounds itself.
    capacity: Nbytes = Nbytes(0)
    replica: int = 0  #: this engine's index among those that share the configuration (data parallelism), from 0
    replicas: int = 1  #: the number of such engines; none may touch another one's frames
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
    #: For a tier of peers: the sealed frames in the hottest arena, for any thread to read. Their memory may be reused
    #: at any moment: a copy counts only if its key still maps to the same view (``is``) when it is complete.
    sealed: Mapping[ChunkKey, memoryview] = attrs.field(factory=dict, eq=False, repr=False)
