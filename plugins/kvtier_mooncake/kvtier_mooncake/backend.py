"""Stores frames in Mooncake Store, for all engines that name the same master and prefix."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence

from kvtier_core.errors import BackendError, StoreFull
from kvtier_core.interfaces import Backend, OpenContext
from kvtier_core.storekit.namespaces import home_of
from kvtier_core.types import FRAME_ALIGNMENT, ChunkKey
from kvtier_mooncake.client import KEYS, Client, NoClient
from kvtier_mooncake.settings import MooncakeSettings

_LANE_NBYTES = (32 << 20) + KEYS * FRAME_ALIGNMENT  # 32 MiB of frames, each followed by some bytes
# Mooncake answers with a code: 0, a number of bytes, or a negative number for an error.
_NO_ROOM = -200
_ILLEGAL_CLIENT = -601  # another client has begun to write the same key
_NOT_READY = -703
_NOT_FOUND = -704
#: There is no frame that fits into the view: nothing, one that is being written, or a longer one.
_MISSES = {_NOT_FOUND, _NOT_READY, -600}
#: Another user writes the key, or has deleted it: what is there is that user's.
_OVERTAKEN = {_ILLEGAL_CLIENT, _NOT_READY, _NOT_FOUND}
_OF_THE_STORE = {-900, -901}
_WORDS = {
    -101: "segment not found",
    _NO_ROOM: "no room",
    -706: "a reader has a lease",
    -707: "the lease ended before the frame had arrived",
    -708: "the frame is being copied",
    -714: "a reader is using it",
    -800: "the transfer failed: the client whose segment has the frame is gone or hanging",
    -900: "the master cannot be reached",
    -901: "the master does not answer",
}


class MooncakeBackend(Backend):
    """Each frame as an object, followed by some bytes, fewer than a page; `client_process` explains why.

    `kvtier_mooncake.settings` explains the settings.
    """

    shared = True

    def __init__(self, settings: MooncakeSettings, ctx: OpenContext):
        self._where = settings.master
        self._timeout = ctx.timeout
        self._home = f"{settings.prefix}/{home_of(ctx.namespace)}"
        self._capacity = ctx.capacity
        self._trouble = ""  # why the store did not answer when the tier was opened
        longest = max(ctx.max_frame_nbytes, ctx.layout.frame_nbytes) + FRAME_ALIGNMENT
        self._lane_nbytes = max(_LANE_NBYTES, -(-longest // FRAME_ALIGNMENT) * FRAME_ALIGNMENT)
        self._client = Client(settings, ctx.timeout, self._lane_nbytes)
        try:
            self.contains([ChunkKey(ctx.namespace.digest)])
        except NoClient:
            self.close()
            raise
        except BackendError as error:
            # If the master is down, the tier rests, and the other tiers serve the engine.
            self._trouble = str(error)

    # -- calls -------------------------------------------------------------------------------------

    def contains(self, keys: Sequence[ChunkKey]) -> Sequence[bool]:
        """A hint: the client whose segment has the frame may be gone."""
        deadline, codes = self._deadline(), []
        for begin in range(0, len(keys), KEYS):
            with self._client.lane(deadline) as lane:
                codes += lane.ask(deadline, "exist", self._names(keys[begin : begin + KEYS]))
        _raise_if_store_failed(self._where, codes)
        return [code == 1 for code in codes]

    def read(self, keys: Sequence[ChunkKey], into: Sequence[memoryview]) -> Sequence[int | BackendError]:
        deadline, codes = self._deadline(), []
        for some, begins, rooms in self._in_parts(into):
            with self._client.lane(deadline) as lane:
                told = lane.ask(deadline, "get", self._names(keys[some]), begins, rooms)
                for view, begin, code in zip(into[some], begins, told, strict=True):
                    lane.load(begin, view[: _frame_nbytes(code, view)])
            codes += told
        _raise_if_store_failed(self._where, codes)
        return [
            _error_of(self._where, code) if code < 0 and code not in _MISSES else _frame_nbytes(code, view)
            for code, view in zip(codes, into, strict=True)
        ]

    def write(self, keys: Sequence[ChunkKey], frames: Sequence[memoryview]) -> Sequence[BackendError | None] | None:
        deadline, codes = self._deadline(), []
        for some, begins, _ in self._in_parts(frames):
            with self._client.lane(deadline) as lane:
                for frame, begin in zip(frames[some], begins, strict=True):
                    lane.store(begin, frame)
                codes += lane.ask(deadline, "put", self._names(keys[some]), begins, list(map(len, frames[some])))
        _raise_if_store_failed(self._where, codes)
        if codes and all(code == _NO_ROOM for code in codes):
            raise _error_of(self._where, _NO_ROOM, sum(map(len, frames)))
        errors = [
            _error_of(self._where, code, len(frame)) if code < 0 and code not in _OVERTAKEN else None
            for code, frame in zip(codes, frames, strict=True)
        ]
        return errors if any(errors) else None

    def delete(self, keys: Sequence[ChunkKey]) -> None:
        deadline = self._deadline()
        for begin in range(0, len(keys), KEYS):
            with self._client.lane(deadline) as lane:
                codes = lane.ask(deadline, "remove", self._names(keys[begin : begin + KEYS]))
            for code in codes:
                if code < 0 and code not in {_NO_ROOM, *_OVERTAKEN}:
                    raise _error_of(self._where, code)

    def facts(self) -> Mapping[str, str]:
        told = {"master": f"{self._where} -> {self._trouble}"} if self._trouble else {}
        return told | ({"capacity": f"{self._capacity} -> none: Mooncake bounds itself"} if self._capacity else {})

    def close(self) -> None:
        self._client.close()

    def _in_parts(self, views: Sequence[memoryview]) -> Iterator[tuple[slice, list[int], list[int]]]:
        """Views whose objects pass through a lane together; where each begins there, and the room that it has."""
        begins: list[int] = []
        rooms: list[int] = []
        for number, view in enumerate(views):
            room = min((-(-len(view) // FRAME_ALIGNMENT) + 1) * FRAME_ALIGNMENT, self._lane_nbytes)
            if len(begins) == KEYS or sum(rooms) + room > self._lane_nbytes:
                yield slice(number - len(begins), number), begins, rooms
                begins, rooms = [], []
            begins.append(sum(rooms))
            rooms.append(room)
        if begins:
            yield slice(len(views) - len(begins), len(views)), begins, rooms

    def _names(self, keys: Iterable[ChunkKey]) -> list[str]:
        return [f"{self._home}/{key.hex()}" for key in keys]

    def _deadline(self) -> float:
        return time.monotonic() + self._timeout


def _frame_nbytes(code: int, view: memoryview) -> int:
    """The length of a frame, from that of its object; 0 if it is longer than its view."""
    nbytes = code - code % FRAME_ALIGNMENT if code > 0 else 0
    return nbytes if nbytes <= len(view) else 0


def _error_of(where: str, code: int, nbytes: int = 0) -> BackendError:
    """The error that a code of the store ``where`` means; ``nbytes`` were to be written."""
    why = f"{where}: {_WORDS.get(code, f'Mooncake answers {code}')}"
    return StoreFull(why, missing=nbytes) if code == _NO_ROOM else BackendError(why)


def _raise_if_store_failed(where: str, codes: Sequence[int]) -> None:
    """Raise if no key was served because the store as a whole failed."""
    if codes and all(code in _OF_THE_STORE for code in codes):
        raise _error_of(where, codes[0])
