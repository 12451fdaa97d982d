"""Reads frames in a worker process of the engine, from the slabs that the tier's process owns."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial

from kvtier_core.errors import BackendError
from kvtier_core.interfaces import PagedKVCache
from kvtier_core.transfer.own_shard import OwnShard
from kvtier_core.transfer.staged_reader import Lane, StagedReader, host_lanes
from kvtier_gds.device_lane import DeviceLane
from kvtier_gds.slab import Extent, Slab
from kvtier_gds.slab_files import SlabFiles


def handle_of(slabs: Sequence[Slab], samples: Sequence[Extent], *, device_only: bool) -> str:
    """How a worker reaches these slabs. `_open_lanes` explains ``samples`` and ``device_only``."""
    return json.dumps({"slabs": [slab.description for slab in slabs], "samples": samples, "device_only": device_only})


def open_reader(handle: str, cache: PagedKVCache, timeout: float) -> StagedReader:
    """``handle`` is from `handle_of`. Raises BackendError."""
    content = json.loads(handle)
    samples = [Extent(*sample) for sample in content["samples"]]
    lanes = partial(_open_lanes, samples=samples, device_only=content["device_only"], timeout=timeout)
    return StagedReader(SlabFiles(content["slabs"]), cache, timeout, lanes)


def _open_lanes(
    files: SlabFiles,
    own: OwnShard,
    cache: PagedKVCache,
    *,
    samples: Sequence[Extent],
    device_only: bool,
    timeout: float,
) -> list[Lane]:
    """Lanes on the GPU if files can be read into its memory, else in the host's. ``cache`` is that of the slots.

    ``device_only``: workers read by themselves only if they can read into a GPU's memory, and ``samples`` of frames
    show that this is no slower than into the host's. A read or a driver that does not answer for ``timeout`` seconds
    has failed. Raises BackendError if the pages cannot be reached, or if workers are not to read by themselves.
    """
    try:
        lane = DeviceLane(files, own, cache, timeout)
    except BackendError as error:
        if device_only:
            raise
        return host_lanes(files, own, cache, str(error))
    if device_only:
        lane.compare(samples)
    return [lane]
