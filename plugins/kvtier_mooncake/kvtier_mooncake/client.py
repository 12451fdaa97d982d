"""Mooncake's client in a process of its own, and the lanes through which the tier's threads reach it."""

from __future__ import annotations

import contextlib
import json
import math
import os
import queue
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import attrs

from kvtier_core.errors import BackendError
from kvtier_mooncake.settings import MooncakeSettings

KEYS = 128  #: at most, in one call
MESSAGE_NBYTES = 1 << 17  #: no message is longer
_LANES = 8  # calls under way; a tier has 4 threads by default
_PATIENCE = 5.0  # seconds for a client to take its segment out of the store


class NoClient(BackendError):
    """Mooncake's client is not installed, or cannot be loaded."""


class Client:
    """Raises BackendError and nothing else. All methods may be called on any thread.

    A call of Mooncake's client cannot be given up, and takes as long as the master or another client hangs. `setup` and
    `close` hold the GIL meanwhile, for 90 s if there is no master. The client has about thirty threads, writes a lot to
    standard error, and a call after `close` ends its process. So it does not run in the engine's process.
    """

    def __init__(self, settings: MooncakeSettings, timeout: float, nbytes: int):
        """``timeout`` is that of a call, in seconds; a lane has ``nbytes`` of memory."""
        self._settings = settings
        self._timeout = timeout
        self._nbytes = nbytes
        self._lock = threading.Lock()
        self._process: _Process | None = None
        self._closed = False

    @contextlib.contextmanager
    def lane(self, deadline: float) -> Iterator[Lane]:
        """A lane that no other thread uses until the end of the context. Starts the client if it does not run."""
        process = self._living()
        lane = process.take(deadline)
        try:
            yield lane
        finally:
            process.give_back(lane)

    def close(self) -> None:
        """End the process. May be called twice."""
        with self._lock:
            self._closed = True
            process, self._process = self._process, None
        if process is not None:
            process.end(_PATIENCE if self._settings.segment else 0)

    def _living(self) -> _Process:
        with self._lock:
            if self._closed:
                raise BackendError(f"{self._settings.master}: the tier is closed")
            if self._process is not None and self._process.has_ended:
                self._process.end(0)
                self._process = None
            if self._process is None:
                self._process = _Process(self._settings, self._timeout, self._nbytes)
            return self._process


class Lane:
    """A connection to the client's process, and memory that both processes have. Used by one thread at a time."""

    def __init__(self, where: str, nbytes: int):
        self.nbytes = nbytes
        self.is_late = False  #: an answer is still to come, and until then the memory is in use
        self.is_broken = False  #: the other end is gone
        self._where = where
        self._ours, self.theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.memory = os.memfd_create("kvtier-mooncake")
        os.ftruncate(self.memory, nbytes)

    def ask(self, deadline: float, call: str, names: Sequence[str], *places: Sequence[int]) -> list[int]:
        """The code of each name. Raises BackendError if there is no answer by ``deadline``."""
        try:
            self._ours.settimeout(left(deadline, self._where))
            self._ours.send(json.dumps([call, names, *places]).encode())
            self.is_late = True
            message = self._ours.recv(MESSAGE_NBYTES)
        except TimeoutError:
            raise BackendError(f"{self._where}: no answer in time") from None
        except OSError:
            message = b""
        self.is_late, self.is_broken = False, not message
        if self.is_broken:
            raise BackendError(f"{self._where}: the process of Mooncake's client has exited")
        return self._codes(json.loads(message), len(names))

    def has_answered(self) -> bool:
        """Has the answer that was not awaited come? Then the lane can be used again."""
        self._ours.settimeout(0)
        try:
            self._ours.recv(MESSAGE_NBYTES)
        except BlockingIOError:
            return False
        except OSError:  # the next call finds the other end gone, too
            pass
        self.is_late = False
        return True

    def load(self, begin: int, view: memoryview) -> None:
        """Copy from the lane's memory. Other Python threads run meanwhile, which a copy by slices would not allow."""
        while view and (done := os.preadv(self.memory, [view], begin)):
            begin, view = begin + done, view[done:]

    def store(self, begin: int, view: memoryview) -> None:
        """Copy to the lane's memory. Raises BackendError."""
        if begin + len(view) > self.nbytes:
            raise BackendError(f"{self._where}: a frame of {len(view)} bytes is longer than its tier declared")
        while view:
            done = os.pwrite(self.memory, view, begin)
            begin, view = begin + done, view[done:]

    def close(self) -> None:
        """Release connection and memory."""
        self._ours.close()
        self.theirs.close()
        os.close(self.memory)

    def _codes(self, answer: Any, count: int) -> list[int]:
        if isinstance(answer, dict):
            kind = NoClient if "missing" in answer else BackendError
            raise kind(f"{self._where}: {answer.get('missing') or answer.get('error')}")
        if len(answer) != count:
            raise BackendError(f"{self._where}: unexpected reply from Mooncake")
        return [int(code) for code in answer]


class _Process:
    """One life of the client's process, with its lanes."""

    def __init__(self, settings: MooncakeSettings, timeout: float, nbytes: int):
        self._where = settings.master
        self._free: queue.LifoQueue[Lane] = queue.LifoQueue()  # memory that was used lately is resident
        self._late: queue.SimpleQueue[Lane] = queue.SimpleQueue()
        self._ended = False
        self._broken = False
        told = {name: getattr(settings, name) for name in attrs.fields_dict(MooncakeSettings)}
        try:
            for _ in range(_LANES):
                self._free.put(Lane(settings.master, nbytes))
            lanes = list(self._free.queue)
            told |= {"timeout": timeout, "lanes": [[lane.theirs.fileno(), lane.memory, nbytes] for lane in lanes]}
            self._popen = subprocess.Popen(
                [sys.executable, "-P", "-m", "kvtier_mooncake.client_process"],
                pass_fds=[fd for lane in told["lanes"] for fd in lane[:2]],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={**_timeouts(timeout), **os.environ},
                start_new_session=True,  # Ctrl-C is for the engine
                bufsize=0,
            )
        except OSError as error:
            self._close_lanes()
            raise BackendError(f"{self._where}: cannot start Mooncake's client: {error.strerror}") from error
        for lane in lanes:
            lane.theirs.close()
        with contextlib.suppress(OSError):  # the first call finds that it has ended
            self._input.write(json.dumps(told).encode() + b"\n")

    @property
    def has_ended(self) -> bool:
        return self._broken or self._popen.poll() is not None

    def take(self, deadline: float) -> Lane:
        """Raises BackendError if all lanes are in use until ``deadline``."""
        for _ in range(self._late.qsize()):
            with contextlib.suppress(queue.Empty):
                lane = self._late.get_nowait()
                (self._free if lane.has_answered() else self._late).put(lane)
        try:
            return self._free.get(timeout=left(deadline, self._where))
        except queue.Empty:
            raise BackendError(f"{self._where}: no answer to {_LANES} calls") from None

    def give_back(self, lane: Lane) -> None:
        self._broken |= lane.is_broken
        (self._late if lane.is_late else self._free).put(lane)
        if self._ended:
            self._close_lanes()

    def end(self, patience: float) -> None:
        """End it; it has ``patience`` seconds to leave the store. A lane in use is closed when it is given back."""
        self._ended = True
        with contextlib.suppress(OSError):
            self._input.close()
        if patience:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._popen.wait(patience)
        self._popen.kill()
        self._popen.wait()
        self._close_lanes()

    @property
    def _input(self) -> Any:
        return self._popen.stdin

    def _close_lanes(self) -> None:
        for lanes in (self._free, self._late):
            with contextlib.suppress(queue.Empty):
                while True:
                    lanes.get_nowait().close()


def left(deadline: float, where: str) -> float:
    """The seconds until a moment of `time.monotonic`, more than 0. Raises BackendError when it has passed."""
    seconds = deadline - time.monotonic()
    if seconds <= 0:
        raise BackendError(f"{where}: no answer in time")
    return seconds


def _timeouts(timeout: float) -> dict[str, str]:
    """Settings by which the client ends calls that no caller waits for any more; by default after 30 s or more."""
    seconds = str(math.ceil(timeout))
    rpc = dict.fromkeys(("MC_RPC_TIMEOUT_MS", "MC_RPC_CONNECT_TIMEOUT_MS"), str(math.ceil(timeout * 1000)))
    transfers = ("MC_TCP_PROGRESS_TIMEOUT_SEC", "MC_TCP_STATUS_TIMEOUT_SEC", "MC_SLICE_TIMEOUT")
    return {**rpc, **dict.fromkeys(transfers, seconds), "MC_STORE_CLIENT_SETUP_RETRIES": "1"}
