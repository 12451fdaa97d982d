"""Two ways to copy whole pages to slots and back on a stream: torch's operators, and kvtier's own CUDA library.

Rows are flat, see `page_lists.Layer`. The caller has checked that all blocks and slots exist.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any, Protocol

import torch

from kvtier_core.interfaces import NO_BLOCK, PagedKVCache
from kvtier_core.layouts import Part
from kvtier_core.transfer.cuda.autotune import DMA, KERNEL, Autotune, choose
from kvtier_core.transfer.cuda.library import Library
from kvtier_core.transfer.page_lists import Layer, layers_of
from kvtier_core.types import Nbytes


class Copier(Protocol):
    """Enqueues copies on a stream and returns at once. Called on the thread that enqueues the engine's work."""

    def gather(self, rows: Sequence[Sequence[int]], slots: Sequence[int], stream: Any) -> None:
        """Copy pages to slots."""

    def scatter(self, rows: Sequence[Sequence[int]], slots: Sequence[int], stream: Any) -> None:
        """Copy slots to pages."""

    def facts(self) -> Mapping[str, str]:
        """The method of copying, in plain words."""

    def close(self) -> None:
        """Free its resources. Called after all copies have ended."""


class TorchCopier:
    """Copies by torch's operators, for any device that torch supports. kvtier's own kernels are tested against it.

    ``streams`` is torch's module for the device; ``shards`` the address of this rank's shard of ``part`` in slot 0;
    ``why`` says in `facts` why kvtier's own library is not used.
    """

    def __init__(
        self,
        streams: ModuleType,
        cache: PagedKVCache,
        part: Part,
        shards: int,
        slots: int,
        slot_nbytes: int,
        why: str = "asked for",
    ):
        self._streams = streams
        self._device = torch.device(cache.device)
        self._why = why
        # Pages and places of each layer, by where the block ids of its group begin and end in a row.
        self._groups: dict[tuple[int, int], list[tuple[torch.Tensor, torch.Tensor]]] = {}
        for layer in layers_of(cache, part):
            pages = _pages(layer, cache.blocks, self._device)
            shape, strides = (slots, layer.blocks, layer.nbytes), (slot_nbytes, layer.nbytes, 1)
            places = _host(shards + layer.offset, shape, strides)
            self._groups.setdefault((layer.first, layer.first + layer.blocks), []).append((pages, places))

    def gather(self, rows: Sequence[Sequence[int]], slots: Sequence[int], stream: Any) -> None:
        with self._streams.stream(stream):
            for slot, span, blocks, layers in self._runs(rows, slots):
                for pages, places in layers:
                    places[slot, span].copy_(pages.index_select(0, blocks), non_blocking=True)

    def scatter(self, rows: Sequence[Sequence[int]], slots: Sequence[int], stream: Any) -> None:
        with self._streams.stream(stream):
            for slot, span, blocks, layers in self._runs(rows, slots):
                for pages, places in layers:
                    pages.index_copy_(0, blocks, places[slot, span].to(self._device, non_blocking=True))

    def facts(self) -> Mapping[str, str]:
        return {"copies": f"torch's operators, slower ({self._why})"}

    def close(self) -> None:
        self._groups = {}

    def _runs(
        self, rows: Sequence[Sequence[int]], slots: Sequence[int]
    ) -> Iterator[tuple[int, slice, torch.Tensor, list[tuple[torch.Tensor, torch.Tensor]]]]:
        """For each run of wanted places: the slot, the places, their blocks, and the layers of their group."""
        for row, slot in zip(rows, slots, strict=True):
            for (first, end), layers in self._groups.items():
                blocks = row[first:end]
                for span in _wanted_spans(blocks):
                    yield slot, span, self._to_device(torch.tensor(blocks[span])), layers

    def _to_device(self, numbers: torch.Tensor) -> torch.Tensor:
        # With pageable memory torch would wait for the stream, and the engine's thread with it.
        return numbers if self._device.type == "cpu" else numbers.pin_memory().to(self._device, non_blocking=True)


class NativeCopier:
    """Copies by copy engine or by kernel, whichever ``autotune`` finds faster for each page size and direction."""

    def __init__(
        self, library: Library, autotune: Autotune, cache: PagedKVCache, part: Part, shards: int, slot_nbytes: int
    ):
        layers: dict[tuple[int, int], dict[int, list[Layer]]] = {}
        for layer in layers_of(cache, part):
            sizes = layers.setdefault((layer.first, layer.first + layer.blocks), {})
            sizes.setdefault(layer.nbytes, []).append(layer)
        device = torch.device(cache.device).index or 0
        # By where the block ids of a group begin and end in a row, and by page size.
        self._groups = {
            span: {nbytes: library.open(device, each, shards, slot_nbytes) for nbytes, each in sizes.items()}
            for span, sizes in layers.items()
        }
        self._method = {
            (nbytes, to_slots): choose(autotune, nbytes, to_slots)
            for nbytes in dict.fromkeys(nbytes for sizes in layers.values() for nbytes in sizes)
            for to_slots in (True, False)
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
            for parts in self._groups.values()
            for nbytes, part in parts.items()
        }

    def close(self) -> None:
        for parts in self._groups.values():
            for part in parts.values():
                part.close()

    def _copy(self, to_slots: bool, rows: Sequence[Sequence[int]], slots: Sequence[int], stream: Any) -> None:
        for (first, end), parts in self._groups.items():
            pieces = pieces_of([row[first:end] for row in rows], slots)
            address, count = pieces.buffer_info()[0], len(pieces) // 3
            for nbytes, part in parts.items():
                copy = part.kernel if self._method[nbytes, to_slots] == KERNEL else part.dma
                copy(to_slots, address, count, stream.cuda_stream)


def pieces_of(rows: Sequence[Sequence[int]], slots: Sequence[int]) -> array[int]:
    """Block, slot and place of every wanted page of one group, in one flat array."""
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


def _wanted_spans(row: Sequence[int]) -> Iterator[slice]:
    """The places between those of NO_BLOCK."""
    begin = None
    for place, block in enumerate([*row, NO_BLOCK]):
        if block == NO_BLOCK and begin is not None:
            yield slice(begin, place)
            begin = None
        elif block != NO_BLOCK and begin is None:
            begin = place


def _pages(layer: Layer, blocks: int, device: torch.device) -> torch.Tensor:
    """The pages of a layer, one a row, as bytes."""
    shape, strides = (blocks, layer.nbytes), (layer.stride, 1)
    if device.type == "cpu":
        return _host(layer.base, shape, strides)
    return torch.as_tensor(_OnDevice(layer.base, shape, strides), device=device)


def _host(address: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> torch.Tensor:
    """Bytes at an address as a tensor, which does not keep the memory alive."""
    span = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    flat = torch.frombuffer((ctypes.c_char * span).from_address(address), dtype=torch.uint8)
    return flat.as_strided(shape, strides)


class _OnDevice:
    """Bytes at an address of the device, as torch imports them; does not keep the memory alive."""

    def __init__(self, address: int, shape: tuple[int, ...], strides: tuple[int, ...]):
        self.__cuda_array_interface__ = {
            "shape": shape, "strides": strides, "typestr": "|u1", "data": (address, False), "version": 3,
        }  # fmt: skip
