"""Two ways to copy whole pages to slots and back on a stream: torch's operators, and the kernels of our own.

Both have the same verbs. Whoever calls has seen to it that all blocks and slots exist.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any, Protocol

import torch

from kvtier_core.interfaces import NO_BLOCK, PagedKVCache
from kvtier_core.transfer.cuda.autotune import DMA, KERNEL, Autotune, choose
from kvtier_core.transfer.cuda.library import Library
from kvtier_core.transfer.page_lists import Layer, layers_of
from kvtier_core.types import Nbytes


class Copier(Protocol):
    """Enqueues copies and returns; nothing has been copied then, or some of it."""

    def gather(self, rows: Sequence[Sequence[int]], slots: Sequence[int], stream: Any) -> None:
        """Pages to slots."""

    def scatter(self, rows: Sequence[Sequence[int]], slots: Sequence[int], stream: Any) -> None:
        """Slots to pages."""

    def facts(self) -> Mapping[str, str]: ...
    def close(self) -> None: ...


class TorchCopier:
    """For any device that torch knows, and what the kernels are compared with.

    ``streams`` is torch's module for the device; ``shards`` the address of this rank's shard in slot 0.
    """

    def __init__(
        self,
        streams: ModuleType,
        table: PagedKVCache,
        shards: int,
        slots: int,
        slot_nbytes: int,
        why: str = "asked for",
    ):
        self._streams = streams
        self._device = torch.device(table.device)
        self._why = why
        self._layers = [
            (
                _pages(layer, table.blocks, self._device),
                _host(shards + layer[3], (slots, table.layout.blocks, layer[2]), (slot_nbytes, layer[2], 1)),
            )
            for layer in layers_of(table)
        ]

    def gather(self, rows: Sequence[Sequence[int]], slots: Sequence[int], stream: Any) -> None:
        with self._streams.stream(stream):
            for slot, places, blocks in self._runs(rows, slots):
                for pages, shard in self._layers:
                    shard[slot, places].copy_(pages.index_select(0, blocks), non_blocking=True)

    def scatter(self, rows: Sequence[Sequence[int]], slots: Sequence[int], stream: Any) -> None:
        with self._streams.stream(stream):
            for slot, places, blocks in self._runs(rows, slots):
                for pages, shard in self._layers:
                    pages.index_copy_(0, blocks, shard[slot, places].to(self._device, non_blocking=True))

    def facts(self) -> Mapping[str, str]:
        return {"copies": f"torch's operators, slower ({self._why})"}

    def close(self) -> None:
        self._layers = []

    def _runs(self, rows: Sequence[Sequence[int]], slots: Sequence[int]) -> Iterator[tuple[int, slice, torch.Tensor]]:
        """Slot, places side by side, and the blocks that belong there."""
        for row, slot in zip(rows, slots, strict=True):
            for places in _between_holes(row):
                yield slot, places, self._to_device(torch.tensor(row[places]))

    def _to_device(self, numbers: torch.Tensor) -> torch.Tensor:
        # From pageable memory torch would wait for the stream, and the engine for torch.
        return numbers if self._device.type == "cpu" else numbers.pin_memory().to(self._device, non_blocking=True)


class NativeCopier:
    """By copy engine or by kernel, whichever was faster for pages of this size and in this direction."""

    def __init__(self, library: Library, autotune: Autotune, table: PagedKVCache, shards: int, slot_nbytes: int):
        sizes = {layer[2]: [each for each in layers_of(table) if each[2] == layer[2]] for layer in layers_of(table)}
        device = torch.device(table.device).index or 0
        self._parts = {nbytes: library.open(device, layers, shards, slot_nbytes) for nbytes, layers in sizes.items()}
        self._method = {
            (nbytes, to_slots): choose(autotune, nbytes, to_slots) for nbytes in sizes for to_slots in (True, False)
        }

    def gather(self, rows: Sequence[Sequence[int]], slots: Sequence[int], stream: Any) -> None:
        self._copy(True, rows, slots, stream)

    def scatter(self, rows: Sequence[Sequence[int]], slots: Sequence[int], stream: Any) -> None:
        self._copy(False, rows, slots, stream)

    def facts(self) -> Mapping[str, str]:
        names = {KERNEL: "kernel", DMA: "copy engine"}
        return {
            f"pages of {Nbytes(nbytes)}": f"stores by {names[self._method[nbytes, True]]}, "
            f"loads by {names[self._method[nbytes, False]]}, {'batches' if part.batched else 'copy by copy'}"
            for nbytes, part in self._parts.items()
        }

    def close(self) -> None:
        for part in self._parts.values():
            part.close()

    def _copy(self, to_slots: bool, rows: Sequence[Sequence[int]], slots: Sequence[int], stream: Any) -> None:
        pieces = _pieces(rows, slots)
        address, count = pieces.buffer_info()[0], len(pieces) // 3
        for nbytes, part in self._parts.items():
            copy = part.kernel if self._method[nbytes, to_slots] == KERNEL else part.dma
            copy(to_slots, address, count, stream.cuda_stream)


def _pieces(rows: Sequence[Sequence[int]], slots: Sequence[int]) -> array[int]:
    """Block, slot and place of every page that is wanted, one after the other."""
    return array(
        "i",
        [
            number
            for row, slot in zip(rows, slots, strict=True)
            for place, block in enumerate(row)
            if block != NO_BLOCK
            for number in (block, slot, place)
        ],
    )


def _between_holes(row: Sequence[int]) -> Iterator[slice]:
    begin = None
    for place, block in enumerate([*row, NO_BLOCK]):
        if block == NO_BLOCK and begin is not None:
            yield slice(begin, place)
            begin = None
        elif block != NO_BLOCK and begin is None:
            begin = place


def _pages(layer: Layer, blocks: int, device: torch.device) -> torch.Tensor:
    base, stride, nbytes, _ = layer
    if device.type == "cpu":
        return _host(base, (blocks, nbytes), (stride, 1))
    return torch.as_tensor(_OnDevice(base, (blocks, nbytes), (stride, 1)), device=device)


def _host(address: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> torch.Tensor:
    """Memory that somebody else keeps, as bytes."""
    span = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    flat = torch.frombuffer((ctypes.c_char * span).from_address(address), dtype=torch.uint8)
    return flat.as_strided(shape, strides)


class _OnDevice:
    """Memory of the device that somebody else keeps, as bytes, in the words that torch understands."""

    def __init__(self, address: int, shape: tuple[int, ...], strides: tuple[int, ...]):
        self.__cuda_array_interface__ = {
            "shape": shape, "strides": strides, "typestr": "|u1", "data": (address, False), "version": 3,
        }  # fmt: skip
