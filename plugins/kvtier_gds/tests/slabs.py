"""Tiers of slabs for the tests, and looking at what they left."""

from __future__ import annotations

import json
import multiprocessing
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from patience import HANG

from kvtier_core.errors import BackendError
from kvtier_core.interfaces import Backend
from kvtier_core.types import ChunkKey
from kvtier_gds.config import GdsConfig
from kvtier_gds.slab_files import SlabFiles
from kvtier_gds.table import Record, Table
from kvtier_testing.samples import make_context, make_frame, make_layout, make_namespace

NBYTES = make_layout().frame_nbytes


def open_slabs(*paths: Path, model: str = "tiny", frames: int = 8, **settings: Any) -> Backend:
    """A tier with room for so many frames of `make_layout`."""
    ctx = make_context(namespace=make_namespace(model), capacity=frames * NBYTES)
    return GdsConfig(paths=paths, **settings).open(ctx)


def write(backend: Backend, *keys: ChunkKey, model: str = "tiny") -> None:
    backend.write(keys, [make_frame(key, NBYTES, namespace=make_namespace(model)) for key in keys])


def read(backend: Backend, key: ChunkKey, nbytes: int = NBYTES) -> bytes | BackendError:
    into = memoryview(bytearray(nbytes))
    (count,) = backend.read([key], [into])
    return count if isinstance(count, BackendError) else bytes(into[:count])


def whole(backend: Backend, key: ChunkKey) -> bool:
    return read(backend, key) == make_frame(key, NBYTES)


def held(backend: Backend) -> list[ChunkKey]:
    return [key for key, _ in backend.scan()]


def records(path: Path) -> dict[int, Record]:
    """The frames in the table of the slab in this folder."""
    with open(path / "kvtier.table", "rb") as file:
        return {entry: Record(*fields) for entry, *fields in Table(file.fileno()).records().tolist()}


def place_of(key: ChunkKey, *paths: Path) -> tuple[Path, Record]:
    """The slab that a key's frame lies in, and its record there."""
    return next(each for each in _all_of(paths) if each[1].key == key)


def _all_of(paths: tuple[Path, ...]) -> Iterator[tuple[Path, Record]]:
    for path in paths:
        yield from ((path / "kvtier.slab", record) for record in records(path).values())


def dies(work: Callable[..., None], *args: Any) -> None:
    """Run ``work(*args)`` in a process that ends by kill -9."""
    process = multiprocessing.get_context("spawn").Process(target=work, args=args)
    process.start()
    process.join(HANG)
    assert process.exitcode == -signal.SIGKILL


def files_of(backend):
    """The files of its slabs, as a worker opens them."""
    return SlabFiles(json.loads(backend.reader_handle())["slabs"])
