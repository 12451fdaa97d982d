"""Opens a mover for an engine on a CUDA device: page-locks slots, reserves memory, chooses how to copy."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
from collections.abc import Sequence
from typing import Any

import torch

from kvtier_core.errors import BackendError
from kvtier_core.interfaces import PagedKVCache
from kvtier_core.layouts import Part
from kvtier_core.transfer.cuda import host_registration
from kvtier_core.transfer.cuda.autotune import Autotune, ScratchAutotune, decided
from kvtier_core.transfer.cuda.checksums import StoreChecksums, SumsMemory
from kvtier_core.transfer.cuda.copier import Copier
from kvtier_core.transfer.cuda.host_registration import PIECE_NBYTES, Pieces
from kvtier_core.transfer.cuda.library import Device, Direction, Method, NativePart, Staging, load
from kvtier_core.transfer.cuda.mover import ArenaSlots, DeviceMover
from kvtier_core.transfer.page_lists import check_cache, layers_of
from kvtier_core.types import Nbytes

#: Copies of each direction are staged through two halves of this size: 128 MiB in all. A job is cut into slices of this
#: size, so a token that the engine copies waits for at most one of them, 0.6 ms at 50 GB/s; and a slice keeps the bus
#: busy fifty times as long as enqueuing it takes.
HALF_NBYTES = 32 << 20
#: Shorter shards are not page-locked one by one: 512 GiB would need more than 65 000 calls, and as many pieces in the
#: driver. The cost has not been measured yet.
_SHORTEST_PIECE = 8 << 20


def open_mover(
    cache: PagedKVCache,
    memory: mmap.mmap | memoryview,
    slot_nbytes: int,
    *,
    device: Device | None = None,
    engine: Any = torch.cuda,
    autotune: Autotune | None = None,
    half_nbytes: int = HALF_NBYTES,
    checksums: bool = True,
) -> DeviceMover:
    """A mover between ``cache`` and ``memory``, an arena's contiguous slots of ``slot_nbytes``.

    The slots are page-locked in the background. ``device`` defaults to that of the cache, ``engine`` to torch's module
    for it; ``autotune`` chooses how to copy, by default from measurements; ``checksums`` enables those of staged
    stores. Packed shards are always staged, with checksums. Raises BackendError and ContractError, see `attach`.
    """
    check_cache(cache, slot_nbytes)
    on = torch.device(cache.device)
    device = device or load().device(on.index or 0)
    if not device.abilities.kernels and not device.abilities.batches:
        raise BackendError(f"the driver is older than CUDA 12.8, and there are no kernels: {device.no_kernels}")
    with contextlib.ExitStack() as undo:
        keep = ctypes.c_char.from_buffer(memory)  # an mmap cannot be closed while its buffer is exported
        undo.callback(lambda keep: None, keep)
        address, count = ctypes.addressof(keep), len(memory) // slot_nbytes
        # The first slots are those of the self-test, one for each rank that shares a shard.
        at_once = cache.layout.replicas * slot_nbytes
        pieces = _pieces(cache, address, count, slot_nbytes)
        registration = host_registration.share(pieces, at_once, device.lock, device.unlock)
        undo.callback(host_registration.release, registration)
        stores, loads = (
            Direction(engine.Stream(on), engine.Stream(on), _staging(device, half_nbytes, undo)) for _ in range(2)
        )
        slots = ArenaSlots(address, count, slot_nbytes, registration)
        autotune = autotune or ScratchAutotune(device, stores, loads)
        summed = checksums or cache.layout.packed
        sums = _sums_memory(device, undo) if summed and stores.staging else None
        opened = functools.partial(_copier, device, cache, slots, (stores, loads), autotune, sums, undo)
        copiers = [opened(part) for part in cache.layout.parts]
        facts = {"kernels": f"none: {device.no_kernels}"} if device.no_kernels else {}
        return DeviceMover(cache, slots, copiers, engine, stores, loads, undo.pop_all().close, facts)


def _pieces(cache: PagedKVCache, address: int, count: int, slot_nbytes: int) -> Pieces:
    """The ranges to page-lock: this rank's shards; or all slots, if shards are unaligned, too short or too long."""
    part = cache.layout.parts[0]
    shard = part.shard_of(cache.rank)
    alone = len(cache.layout.parts) == 1 and len(part.shards) > 1 and _SHORTEST_PIECE <= shard.nbytes <= PIECE_NBYTES
    if not alone or any(each % mmap.PAGESIZE for each in (address, slot_nbytes, shard.offset, shard.nbytes)):
        return Pieces(address, count * slot_nbytes)
    return Pieces(address + shard.offset, count * slot_nbytes, shard.nbytes, slot_nbytes)


def _staging(device: Device, half_nbytes: int, undo: contextlib.ExitStack) -> Staging | None:
    """Memory to stage copies in; None if there are no kernels, or the engine left too little."""
    if not device.abilities.kernels:
        return None
    try:
        staging = device.staging(half_nbytes)
    except BackendError:
        return None
    undo.callback(staging.close)
    return staging


def _sums_memory(device: Device, undo: contextlib.ExitStack) -> SumsMemory | None:
    """Memory for checksums; None if the engine left too little."""
    try:
        memory = SumsMemory(device)
    except BackendError:
        return None
    undo.callback(memory.close)
    return memory


def _copier(
    device: Device,
    cache: PagedKVCache,
    slots: ArenaSlots,
    directions: Sequence[Direction],
    autotune: Autotune,
    sums: SumsMemory | None,
    undo: contextlib.ExitStack,
    part: Part,
) -> Copier:
    layers = list(layers_of(cache, part))
    shard = part.shard_of(cache.rank)
    shards = slots.address + shard.offset
    packed_nbytes = shard.nbytes if shard.packed else 0
    native = device.part(layers, shards, slots.nbytes, slots.locked.base, slots.locked.stride, packed_nbytes)
    undo.callback(native.close)
    stores, loads = directions
    if packed_nbytes:
        _check_packing(device, native, stores, loads, sums)
        autotune = decided(Method.STAGED)
    store, load_ = (
        autotune(layers, _possible(native, through, to_slots), to_slots)
        for through, to_slots in ((stores, True), (loads, False))
    )
    name = ", ".join(cache.layout.groups[group].name for group in part.groups)
    why_not = "" if sums else "no memory is reserved for them"
    if store.method is not Method.STAGED:
        why_not = f"stores are {store.method}"
    checksums = StoreChecksums(name, sums, shards, shard.nbytes, slots.nbytes, why_not, packed=packed_nbytes > 0)
    return Copier(name, native, store, load_, checksums)


def _check_packing(
    device: Device, native: NativePart, stores: Direction, loads: Direction, sums: SumsMemory | None
) -> None:
    """Raises BackendError unless copies can be packed."""
    if not device.abilities.kernels:
        raise BackendError(f"nothing packs shards here: the GPU has no kernels: {device.no_kernels}")
    if not (stores.staging and loads.staging and sums):
        raise BackendError("the engine left too little memory to pack shards in")
    if not native.can(Method.STAGED, True, stores.staging):
        half = Nbytes(stores.staging.half_nbytes)
        raise BackendError(f"shards are too long to be packed: one does not fit into {half} beside its packed form")


def _possible(native: NativePart, through: Direction, to_slots: bool) -> list[Method]:
    return [method for method in Method if native.can(method, to_slots, through.staging)]
