"""The tiers of a server in a worker process of an engine: its arenas, and the stores that workers read."""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import attrs

from kvtier_core.config.decode import written
from kvtier_core.config.load import load_config
from kvtier_core.config.model import ArenaTierConfig, StoreTierConfig
from kvtier_core.config.registry import Registry
from kvtier_core.errors import BackendError, Unanswered
from kvtier_core.interfaces import AllocatorBackend, ArenaConfig, JobResult, Mover, OpenContext, PagedKVCache, PageList
from kvtier_core.transfer import movers
from kvtier_core.types import Nbytes
from kvtier_core.work.io_pool import run_aside
from kvtier_remote import user_locks
from kvtier_remote.connection import Connection, Silent, connect, wait_for_end
from kvtier_remote.guarded_memory import GuardedMemory
from kvtier_remote.protocol import CALLS, DONE, Header, ProtocolError, ServedArena, encode, reason, result

_MADV_POPULATE_WRITE = 23  # Linux 5.14; not in Python's mmap
#: Bytes whose pages are mapped at a time, with the GIL held.
_PIECE = 8 << 20
#: Seconds for which a worker waits for an answer, once, when it attaches an arena.
_PATIENCE = 5.0


def handle_of(path: Path, session: int, number: int, arena: ServedArena) -> str:
    """Plain text by which `ServedArenaConfig.attach` reaches an arena of a session."""
    return json.dumps({"path": str(path), "session": session, "number": number, **attrs.asdict(arena)})


def served_tier(handle: str) -> ArenaTierConfig:
    """An arena of a server as a tier, for a worker."""
    return ArenaTierConfig(json.loads(handle)["name"], ServedArenaConfig(), Nbytes(1))


def reader_handle_of(tier: StoreTierConfig, handle: str) -> str:
    """Plain text by which `served_store` and a reader reach a store with this ``handle``."""
    settings = {"capacity": written(tier.capacity), "timeout": written(tier.timeout), **written(tier.config)}
    return json.dumps({"tier": settings, "handle": handle})


def served_store(name: str, handle: str) -> tuple[StoreTierConfig, str]:
    """A store tier of a server, for a worker, and its own handle. Raises ConfigError if its plugin is not installed."""
    told = json.loads(handle)
    tiers = [{"type": "heap", "capacity": "1B"}, told["tier"]]
    config = load_config({"version": 1, "tiers": tiers}, Registry.discover(), label="the server's file")
    return attrs.evolve(config.stores[0], name=name), told["handle"]


@attrs.frozen
class ServedArenaConfig(ArenaConfig):
    """An arena whose memory a server has."""

    type: ClassVar[str] = "served"
    devices: ClassVar[tuple[str, ...]] = movers.DEVICES
    packs: ClassVar[tuple[str, ...]] = movers.DEVICES

    def open(self, ctx: OpenContext) -> AllocatorBackend:
        raise BackendError("only the server can open it")

    def attach(self, handle: str, cache: PagedKVCache) -> Mover:
        told = json.loads(handle)
        with contextlib.ExitStack() as closing, contextlib.ExitStack() as afterwards:
            try:
                connection = connect(Path(told["path"]), files=1)
                closing.callback(connection.close)
                file, kept = _lent(connection, told["session"], told["number"], cache.rank)
                afterwards.callback(os.close, file)
                memory = GuardedMemory(file)
            except Silent as error:
                raise Unanswered(f"the server at {told['path']} does not answer: {error}") from error
            except (ProtocolError, OSError) as error:
                raise BackendError(f"the server at {told['path']} does not share its memory: {error}") from error
            if cache.device == "cpu":  # for a GPU, page-locking does it
                run_aside(lambda: _populate(memory), "populate")
            mover = movers.open_mover(cache, memory, told["slot_nbytes"])
            mover = ServedMover(mover, connection, memory, os.dup(file) if kept else None)
            closing.pop_all()
        return mover


def probe(path: Path) -> None:
    """Return when the server at this socket has answered. Raises BackendError if it does not."""
    try:
        connection = connect(path)
        try:
            _ask(connection, "detach")
        finally:
            connection.close()
    except ProtocolError as error:
        raise BackendError(f"the server at {path} did not respond in time: {error}") from error


def _lent(connection: Connection, session: int, number: int, rank: int) -> tuple[int, bool]:
    """The file of an arena's memory, and whether that is kept: then this process has locked it as its user.

    Raises ProtocolError and OSError.
    """
    boot, nbytes = _ask(connection, "attach", session, number, rank)
    if len(connection.descriptors) != 1:
        raise ProtocolError("it sent no file")
    descriptor = connection.descriptors.pop()
    with contextlib.ExitStack() as closing:
        closing.callback(os.close, descriptor)
        if os.fstat(descriptor).st_size != nbytes:
            raise ProtocolError("it sent a file of another length")
        if not boot:
            closing.pop_all()
            return descriptor, False
        file = user_locks.lock(descriptor, boot)
    try:
        _ask(connection, "attached")  # a server that has ended by now may have left the memory to one that saw no lock
    except BaseException:
        os.close(file)
        raise
    return file, True


def _populate(memory: mmap.mmap) -> None:
    """Map all pages: each would cost a fault in some copy. An engine may serve meanwhile, so not all in one go."""
    for begin in range(0, len(memory), _PIECE):
        began = time.monotonic()
        with contextlib.suppress(OSError):  # an older kernel
            memory.madvise(_MADV_POPULATE_WRITE, begin, min(_PIECE, len(memory) - begin))
        time.sleep(time.monotonic() - began)


def _ask(connection: Connection, name: str, *values: Any) -> Any:
    body = encode(values)
    connection.send(Header(len(body), 1, CALLS[name].number, 0, 0), body)
    deadline = time.monotonic() + _PATIENCE
    while (left := deadline - time.monotonic()) > 0:
        for header, answer in connection.receive():
            if header.call != DONE:
                raise ProtocolError(reason(answer))
            return result(name, answer)
        connection.wait(left)
    raise Silent(f"it has not answered for {_PATIENCE} s")


class ServedMover(Mover):
    """A mover to memory of a server, which knows by the connection that this process may touch it.

    A job has failed if the memory is broken when it has ended: what it copied may be zeros.

    If the memory outlives its server, no job begins once the server is gone, and the next server may take the memory as
    soon as no job is under way, even if the engine is idle then: a thread waits for that moment.
    """

    def __init__(self, mover: Mover, connection: Connection, memory: GuardedMemory, kept: int | None):
        """``kept`` is the file of memory that outlives its server, locked by this process as its user, and closed here;
        None for other memory."""
        self._mover = mover
        self._connection = connection
        self._memory = memory
        self._jobs: set[int] = set()  # under way
        self._lost = False  # is the server gone? Only if the memory is kept
        self._file = None if kept is None else open(kept, "rb", buffering=0)  # noqa: SIM115
        if self._file:
            end = os.dup(connection.fileno())
            run_aside(lambda: self._watch(end), "server")

    def _watch(self, end: int) -> None:
        """Wait until one side has closed the connection, of which ``end`` is a descriptor."""
        wait_for_end(end)
        os.close(end)
        self._lost = True
        self._unlock_if_lost()

    def _unlock_if_lost(self) -> None:
        # A job that begins is added before it looks at `_lost`: either it is seen here, or it does not begin.
        if self._lost and not self._jobs and self._file:
            with contextlib.suppress(ValueError):  # closed, and unlocked
                user_locks.unlock(self._file.fileno())

    @contextlib.contextmanager
    def _begun(self, job: int) -> Iterator[None]:
        self._jobs.add(job)
        try:
            if self._lost:
                raise BackendError("the server is gone")
            if self._memory.is_broken:
                raise BackendError("the memory of the server was truncated or opened to others")
            yield
        except BaseException:
            self._ended([job])
            raise

    def _ended(self, jobs: Iterable[int]) -> None:
        self._jobs.difference_update(jobs)
        self._unlock_if_lost()

    def store(self, job: int, pages: PageList, slots: Sequence[int]) -> None:
        with self._begun(job):
            self._mover.store(job, pages, slots)

    def mark(self) -> object:
        return self._mover.mark()

    def load(self, job: int, slots: Sequence[int], pages: PageList, after: object = None) -> None:
        with self._begun(job):
            self._mover.load(job, slots, pages, after)

    def finished(self) -> Sequence[JobResult]:
        ended = self._mover.finished()
        if ended and self._memory.is_broken:
            ended = [JobResult(each.job, ok=False) for each in ended]
        self._ended(each.job for each in ended)
        return ended

    def wait(self, jobs: Collection[int], timeout: float = float("inf")) -> None:
        self._mover.wait(jobs, timeout)

    def fence(self, jobs: Collection[int]) -> None:
        self._mover.fence(jobs)

    def facts(self) -> Mapping[str, str]:
        return self._mover.facts()

    def close(self) -> None:
        """Wait for the copies under way; then the server may give the slots to others."""
        self._mover.close()
        if self._file and not self._file.closed:
            user_locks.unlock(self._file.fileno())
        with contextlib.suppress(ProtocolError):  # it is gone, or learns it when this process ends
            _ask(self._connection, "detach")
        self._connection.close()
        if self._file:
            self._file.close()
