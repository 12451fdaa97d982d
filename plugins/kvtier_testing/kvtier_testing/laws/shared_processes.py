"""The other processes of the laws of shared stores: each function is one user of the store, and reports faults."""

from __future__ import annotations

import multiprocessing
import random
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing.synchronize import Barrier

from kvtier_core.errors import BackendError
from kvtier_core.interfaces import Backend, BackendConfig, OpenContext
from kvtier_core.types import FRAME_ALIGNMENT, ChunkKey, Nbytes
from kvtier_testing.laws.backend_frames import damage_of, read
from kvtier_testing.resources import PATIENCE
from kvtier_testing.samples import make_frame, make_key, same


def users(count: int) -> ProcessPoolExecutor:
    """Processes for the functions below, which begin when all of them have opened the store."""
    spawn = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(count, mp_context=spawn, initializer=_wait_for, initargs=(spawn.Barrier(count),))


_started: list[Barrier] = []  # in a process of `users`: where it waits for the others


def _wait_for(others: Barrier) -> None:
    _started.append(others)


def _open_with_others(config: BackendConfig, ctx: OpenContext) -> Backend:
    backend = config.open(ctx)
    _started[0].wait(PATIENCE)
    return backend


def write_one(config: BackendConfig, ctx: OpenContext, key: ChunkKey, sealed: bytes) -> None:
    """Open, write one frame, close."""
    backend = config.open(ctx)
    backend.write([key], [memoryview(sealed)])
    backend.close()


def delete_one(config: BackendConfig, ctx: OpenContext, key: ChunkKey) -> None:
    """Open, delete one key, close."""
    backend = config.open(ctx)
    backend.delete([key])
    backend.close()


def write_many(config: BackendConfig, ctx: OpenContext, keys: Sequence[ChunkKey], seed: int) -> list[str]:
    """Write each key in turn, in frames of several sizes; what went wrong."""
    rng = random.Random(seed)
    backend = _open_with_others(config, ctx)
    wrong = []
    for key in keys:
        nbytes = rng.randint(2, 9) * FRAME_ALIGNMENT
        wrong += fault_of_write(backend, key, make_frame(key, nbytes=nbytes, seed=rng.getrandbits(32)))
    backend.close()
    return wrong


def write_numbered(config: BackendConfig, ctx: OpenContext, numbers: Sequence[int], nbytes: int) -> list[str]:
    """Write the keys of these numbers once, in frames of ``nbytes``; what went wrong."""
    backend = _open_with_others(config, ctx)
    wrong = []
    for key in map(make_key, numbers):
        wrong += fault_of_write(backend, key, make_frame(key, nbytes=nbytes, namespace=ctx.namespace))
    backend.close()
    return wrong


def overwrite_and_delete(
    config: BackendConfig, ctx: OpenContext, key: ChunkKey, sizes: Sequence[Nbytes], seed: int, rounds: int
) -> list[str]:
    """Overwrite a key with frames of all sizes, and delete it at times, at last not; what went wrong."""
    rng = random.Random(seed)
    frames = [make_frame(key, nbytes=nbytes, seed=rng.getrandbits(32)) for nbytes in sizes]
    backend = _open_with_others(config, ctx)
    wrong = []
    for _ in range(rounds):
        if rng.random() < 0.25:
            wrong += _fault_of("a delete", lambda: backend.delete([key]))
        wrong += fault_of_write(backend, key, rng.choice(frames))
    backend.close()
    return wrong


def keep_to_itself(config: BackendConfig, ctx: OpenContext, key: ChunkKey, seed: int, rounds: int) -> list[str]:
    """Write, read, quarantine and delete one key that nobody else of this namespace uses; what went wrong."""
    rng = random.Random(seed)
    backend = _open_with_others(config, ctx)
    wrong: list[str] = []
    for _ in range(rounds):
        nbytes = rng.randint(2, 9) * FRAME_ALIGNMENT
        written = make_frame(key, nbytes=nbytes, seed=rng.getrandbits(32), namespace=ctx.namespace)
        wrong += fault_of_write(backend, key, written)
        found = read(backend, key, 9 * FRAME_ALIGNMENT)
        if not same(found, written):
            damage = damage_of(found, key, ctx.namespace) if found else "missing"
            wrong.append(f"a frame that was just written is {damage or 'another one'}")
        if rng.random() < 0.5:
            backend.quarantine([key])
            backend.delete([key])
            if any(backend.contains([key])):
                wrong.append("a key that was just deleted is found")
    backend.close()
    return wrong


def write(backend: Backend, keys: Sequence[ChunkKey], frames: Sequence[memoryview]) -> list[BackendError | None]:
    """Write frames; for each key None, or why it was not stored."""
    errors = backend.write(keys, frames)
    return [None] * len(keys) if errors is None else list(errors)


def store(backend: Backend, key: ChunkKey, frame: memoryview) -> None:
    """Write one frame. Raises why it was not stored."""
    (error,) = write(backend, [key], [frame])
    if error is not None:
        raise error


def fault_of_write(backend: Backend, key: ChunkKey, frame: memoryview) -> list[str]:
    """Write one frame. What was wrong, in words; nothing if it was stored."""
    return _fault_of("a write", lambda: write(backend, [key], [frame])[0])


def _fault_of(what: str, call: Callable[[], BackendError | None]) -> list[str]:
    try:
        error = call()
    except BackendError as raised:
        return [f"{what} raised {type(raised).__name__}: {raised}"]
    except Exception as raised:  # noqa: BLE001 - whatever it is, the law reports it
        return [f"{what} raised {type(raised).__name__}, not a BackendError: {raised}"]
    return [] if error is None else [f"{what} returned {type(error).__name__}: {error}"]
