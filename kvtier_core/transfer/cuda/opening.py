"""Opens a mover for an engine on a CUDA device: page-locks slots, reserves memory, chooses how to copy."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from kvtier_core.errors import BackendError
from kvtier_core.interfaces import PagedKVCache
from kvtier_core.layouts import Part
from kvtier_core.transfer.cuda import host_registration
from kvtier_core.transfer.cuda.autotune import Autotune, ScratchAutotune, decided
from kvtier_core.transfer.cuda.checksums import StoreChecksums, SumsMemory
from kvtier_core.transfer.cuda.copier import Copier
from kvtier_core.transfer.cuda.host_registration import PIECE_NBYTES, Pieces
from kvtier_core.transfer.cuda.library import Device, Direction, Method, NativePart, Staging, load, new_stream
from kvtier_core.transfer.cuda.mover import ArenaSlots, DeviceMover
from kvtier_core.transfer.page_lists import check_cache, layers_of

#: Copies of each direction are staged through two halves of this size: 128 MiB in all. A job is cut into slices of this
#: size. Shorter ones are slower: while a long kernel of the engine runs, only the slices in both halves continue.
HALF_NBYTES = 32 << 20
_ALIGNMENT = 256  #: of shards in a half, as in csrc/cuda/part.cpp
#: Shorter shards are not page-locked one by one: 512 GiB would need more than 65 000 calls, and as many pieces in the
#: driver. On an H100 pieces of 512 KiB took five times as long per GiB as those of 8 MiB.
_SHORTEST_PIECE = 8 << 20
_Memory = TypeVar("_Memory", Staging, SumsMemory)


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
    stores. Packed shards are always staged, with checksums, in halves that hold at least one. Raises BackendError and
    ContractError, see `movers.open_mover`.
    """
    check_cache(cache, slot_nbytes)
    on = torch.device(cache.device)
    device = device or load().device(on.index or 0)
    if not device.abilities.kernels and not device.abilities.batches:
        raise BackendError(f"the driver is older than CUDA 12.8, and there are no kernels: {device.no_kernels}")
    with contextlib.ExitStack() as undo:
        keep = ctypes.c_char.from_buffer(memory)  # an mmap cannot be closed while its buffer is exported
        address, count = ctypes.addressof(keep), len(memory) // slot_nbytes
        # The first slots are those of the self-test, one for each rank that shares a shard.
        at_once = cache.layout.replicas * slot_nbytes
        pieces = _pieces(cache, address, count, slot_nbytes)
        registration = host_registration.share(pieces, at_once, device.lock, device.unlock, keep)
        undo.callback(host_registration.release, registration)
        half_nbytes = max(half_nbytes, _longest_packing(cache))
        staging = functools.partial(_if_there_is_room, lambda: device.staging(half_nbytes), undo)
        stores, loads = (
            Direction(new_stream(engine, on), new_stream(engine, on), staging() if device.abilities.kernels else None)
            for _ in range(2)
        )
        slots = ArenaSlots(address, count, slot_nbytes, registration)
        autotune = autotune or ScratchAutotune(device, stores, loads)
        summed = checksums or cache.layout.packed
        sums = _if_there_is_room(lambda: SumsMemory(device), undo) if summed and stores.staging else None
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


def _longest_packing(cache: PagedKVCache) -> int:
    """Room for this rank's longest shard in both forms; 0 if shards are not packed."""
    shards = [part.shard_of(cache.rank) for part in cache.layout.parts]
    return max((shard.pages_nbytes + shard.nbytes + 2 * _ALIGNMENT for shard in shards if shard.packed), default=0)


def _if_there_is_room(reserve: Callable[[], _Memory], undo: contextlib.ExitStack) -> _Memory | None:
    """Memory of the device, which ``undo`` frees; None if the engine left too little."""
    try:
        memory = reserve()
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
        autotune(layers, [each for each in Method if native.can(each, to_slots, through.staging)], to_slots)
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
        raise BackendError(f"set packing: off: the GPU has no packing kernels: {device.no_kernels}")
    if not (stores.staging and loads.staging and sums and native.can(Method.STAGED, True, stores.staging)):
        raise BackendError("set packing: off: the engine left too little GPU memory to pack shards")
