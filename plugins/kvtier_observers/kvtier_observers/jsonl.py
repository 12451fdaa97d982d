"""An observer that writes every event as a line of JSON."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pathlib
import secrets
import time
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import attrs

from kvtier_core.errors import BackendError
from kvtier_core.interfaces import Observer, ObserverConfig, OpenContext
from kvtier_core.storekit.trial import new_file
from kvtier_core.types import Event, Nbytes

#: Number of files that an engine fills in turn from its share of the capacity. The oldest is removed for the next.
_FILES = 4
#: The shortest file: a line without keys takes less than a tenth of it.
_SHORTEST = 16 << 10
#: Characters kept of a request's id, which a client may choose.
_ID = 256


def _enough(config: object, field: attrs.Attribute, nbytes: Nbytes) -> None:
    if nbytes < 1 << 20:
        raise ValueError(f"'{field.alias}' must be at least 1MiB")


@attrs.frozen
class JsonLinesConfig(ObserverConfig):
    """The keys of ``type: jsonl``."""

    type: ClassVar[str] = "jsonl"
    path: pathlib.Path  #: a folder, whose other files are left alone; each start of an engine adds a file
    #: Bytes of all such files in the folder. The oldest are removed for new ones.
    capacity: Nbytes = attrs.field(default=Nbytes(256 << 20), validator=_enough)
    keys: bool = False  #: write the key of each chunk: anyone who knows a prompt can find it by its keys

    def open(self, ctx: OpenContext) -> Observer:
        """Begin a file. Raises BackendError."""
        try:
            return JsonLines(self, ctx)
        except OSError as error:
            raise BackendError(f"cannot write {self.path}: {error}") from error


class JsonLines(Observer):
    """Appends to files that only their owner can access, and keeps all of them within a capacity.

    An engine locks the file that it writes, so that no other engine removes it. If a killed engine left part of a line
    at the end, the next engine that opens the folder cuts it off.
    """

    def __init__(self, config: JsonLinesConfig, ctx: OpenContext):
        """Raises OSError."""
        self._folder = config.path
        self._capacity = config.capacity
        self._keys = config.keys
        self._longest = max(_SHORTEST, config.capacity // (_FILES * ctx.replicas))  # of a file
        self._file = -1
        self._room = 0
        self._checking = ctx.checking
        for file in self._files() if not ctx.checking else ():
            with _locked(file) as descriptor:
                if descriptor is not None:
                    _cut_off_half_a_line(descriptor)
        self._next_file()

    def observe(self, events: Sequence[Event]) -> None:
        """Append a line for each event. Raises OSError."""
        now = round(time.time(), 3)
        lines = b""
        for event in events:
            line = self._line(event, now)
            if len(lines) + len(line) > self._room:
                self._write(lines)
                self._next_file()
                lines = b""
            lines += line
        self._write(lines)

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)

    def _line(self, event: Event, now: float) -> bytes:
        """An event as JSON, without empty values."""
        told: dict[str, Any] = {"time": now, "event": event.kind.value, "tier": event.tier}
        told |= {"chunks": len(event.keys), "bytes": event.nbytes, "tokens": event.tokens}
        told |= {"seconds": round(event.seconds, 6), "why": event.why, "request": event.request[:_ID]}
        told = {name: value for name, value in told.items() if value}
        if event.usage:
            told["usage"] = attrs.asdict(event.usage, filter=lambda field, value: field.name != "tier")
        keys = {"keys": [key.hex() for key in event.keys]} if self._keys and event.keys else {}
        line = f"{json.dumps(told | keys)}\n".encode()
        return line if len(line) <= self._longest else f"{json.dumps(told)}\n".encode()

    def _write(self, lines: bytes) -> None:
        """Append whole lines, with one call if the system can."""
        self._room -= len(lines)
        while lines:
            lines = lines[os.write(self._file, lines) :]

    def _next_file(self) -> None:
        """Begin a file; the oldest ones are removed for it."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
        self._make_room()
        name = f"{time.time_ns():020}-{secrets.token_hex(4)}.kvtier-events.jsonl"
        self._file = new_file(self._folder, name, os.O_WRONLY | os.O_APPEND, trial=self._checking)
        fcntl.flock(self._file, fcntl.LOCK_EX)
        self._room = self._longest

    def _make_room(self) -> None:
        """Remove the oldest files that no engine writes. A file that is being written counts as full."""
        sizes = {}
        for file in self._files():
            with contextlib.suppress(FileNotFoundError), _locked(file) as descriptor:
                sizes[file] = self._longest if descriptor is None else os.fstat(descriptor).st_size
        for file in sorted(sizes):
            if sum(sizes.values()) + self._longest <= self._capacity:
                return
            with contextlib.suppress(FileNotFoundError), _locked(file) as descriptor:
                if descriptor is not None:
                    if not self._checking:
                        file.unlink()
                    del sizes[file]
        if sum(sizes.values()) + self._longest > self._capacity:
            raise OSError(f"{len(sizes)} engines write to {self._folder}, and their files fill its {self._capacity}")

    def _files(self) -> list[pathlib.Path]:
        return sorted(self._folder.glob("*.kvtier-events.jsonl"))


@contextlib.contextmanager
def _locked(file: pathlib.Path) -> Iterator[int | None]:
    """Yields a descriptor of the file while no engine writes it, and None if one does."""
    descriptor = os.open(file, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield None
        else:
            yield descriptor
    finally:
        os.close(descriptor)


def _cut_off_half_a_line(descriptor: int) -> None:
    """Truncate a file after its last whole line."""
    size = end = os.fstat(descriptor).st_size
    while end and (piece := os.pread(descriptor, min(end, 1 << 16), max(0, end - (1 << 16)))):
        if b"\n" in piece:
            end = end - len(piece) + piece.rindex(b"\n") + 1
            break
        end -= len(piece)
    if end != size:
        os.ftruncate(descriptor, end)
