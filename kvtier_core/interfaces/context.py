"""The context in which a Config opens a tier."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from pathlib import Path

import attrs

from kvtier_core.layouts import ChunkLayout
from kvtier_core.types import ChunkKey, Namespace, Nbytes, Seconds


class Medium(enum.Enum):
    """The medium of a tier, for an engine's metrics of the sources of hits."""

    HOST = "host"  #: memory of this node
    DISK = "disk"  #: a disk of this node
    UNSPECIFIED = "unspecified"  #: anything else, a remote store for instance


@attrs.frozen
class OpenContext:
    """The environment in which the stack opens a plugin."""

    #: Of the frames: that of the engine, in a shared store with the codec and the id of the seal key as further facts,
    #: where there are any.
    namespace: Namespace
    layout: ChunkLayout
    #: This engine's share of the tier's capacity in YAML, in bytes of frames. The tier keeps its own frames within
    #: it; a store that is not shared deletes frames of other namespaces that would exceed it. Of a shared store it is
    #: what all of its users may take together, and 0 if the store bounds itself.
    capacity: Nbytes = Nbytes(0)
    replica: int = 0  #: which of the engines that share this configuration this is (data parallelism), from 0
    replicas: int = 1  #: the number of such engines; none may touch another one's frames
    max_frame_nbytes: Nbytes = Nbytes(0)  #: no frame that this tier writes is longer; 0: not known
    #: Of an arena: the bytes of a slot. The arena's codec decides; by default frames lie there as the engine has them.
    slot_nbytes: int = attrs.field(default=attrs.Factory(lambda self: self.layout.frame_nbytes, takes_self=True))
    #: Of each shard of the layout the NUMA node of the devices that copy it. None: it is not known, they have several,
    #: or the machine has one. Empty: not known of any.
    numa_nodes: tuple[int | None, ...] = ()
    timeout: Seconds = Seconds(5)  #: after this a call to a store tier should give up and raise BackendError
    #: Of an arena: the folder, on a file system in memory, where its memory is to outlive this process
    #: (`SupportsKeeping`). None: nowhere.
    keep: Path | None = None
    #: Of a tier of peers: the sealed frames in the hottest arena, for any thread to read. Their memory may be used
    #: again at any moment: a copy counts only if its key still has the same view (``is``) when it is complete.
    sealed: Mapping[ChunkKey, memoryview] = attrs.field(factory=dict, eq=False, repr=False)
