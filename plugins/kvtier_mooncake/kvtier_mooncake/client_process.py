"""The process of Mooncake's client: it does what its tier asks for, until the tier is gone.

`kvtier_mooncake.client` starts it. Its settings are the first line of standard input, and it ends with that input.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import secrets
import socket
import sys
import threading
from typing import Any

import attrs

from kvtier_core.types import FRAME_ALIGNMENT
from kvtier_mooncake.client import MESSAGE_NBYTES

_BUFFER_NBYTES = 16 << 20  # the client requires one, for calls that are not made here
_memcmp = ctypes.CDLL(None).memcmp
_memcmp.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]


@attrs.frozen
class _Memory:
    """Memory that this process maps."""

    mapped: mmap.mmap
    address: int

    @classmethod
    def of(cls, fd: int, nbytes: int) -> _Memory:
        """The memory behind a descriptor, or new memory for -1."""
        mapped = mmap.mmap(fd, nbytes)
        return cls(mapped, ctypes.addressof(ctypes.c_char.from_buffer(mapped)))


class _Store:
    """The client. The first call sets it up, or the next one if that fails."""

    def __init__(self, settings: dict[str, Any]):
        self._settings = settings
        self._lanes = [_Memory.of(fd, nbytes) for _, fd, nbytes in settings["lanes"]]
        self._others = [_Memory.of(-1, nbytes) for _, _, nbytes in settings["lanes"]]  # frames of others, to compare
        self._lock = threading.Lock()
        self._client: Any = None
        self._replication: Any = None

    def serve(self) -> None:
        for number in range(len(self._lanes)):
            threading.Thread(target=self._serve, args=(number,), daemon=True).start()

    def close(self) -> None:
        """Take the segment out of the store."""
        if self._client is not None and self._settings["segment"]:
            self._client.close()

    def _serve(self, number: int) -> None:
        line = socket.socket(fileno=self._settings["lanes"][number][0])
        try:
            while message := line.recv(MESSAGE_NBYTES):
                line.send(json.dumps(self._answer(number, *json.loads(message))).encode())
        finally:
            os._exit(1)  # a tier that waits for an answer learns that none will come

    def _answer(self, number: int, call: str, names: list[str], *places: list[int]) -> list[int] | dict[str, str]:
        try:
            with self._lock:
                self._client = self._client or self._set_up()
        except ImportError as error:
            return {"missing": f"no client of Mooncake: {error}; see the README of kvtier-mooncake for what to install"}
        except OSError as error:
            return {"error": error.strerror or str(error)}
        codes: list[int] = getattr(self, f"_{call}")(number, names, *places)
        return codes

    def _set_up(self) -> Any:
        """Raises OSError, and ImportError."""
        from mooncake.store import MooncakeDistributedStore, ReplicateConfig

        settings = self._settings
        host, _, port = settings["master"].rpartition(":")
        # `setup` tries for a long time, and holds the GIL: it is called only when there is something to connect to.
        with socket.create_connection((host, int(port)), timeout=settings["timeout"]) as connection:
            here = connection.getsockname()[0]
        client = MooncakeDistributedStore()
        where = settings["host"] or here, "P2PHANDSHAKE"
        how = settings["protocol"], ",".join(settings["devices"]), settings["master"]
        if code := client.setup(*where, settings["segment"], _BUFFER_NBYTES, *how):
            raise OSError(f"cannot set up Mooncake's client: {code}")
        for memory in [*self._lanes, *self._others]:
            if code := client.register_buffer(memory.address, len(memory.mapped)):
                raise OSError(f"Mooncake's client cannot register memory: {code}")
        self._replication = ReplicateConfig()
        self._replication.replica_num = settings["replicas"]
        self._replication.preferred_segment = settings["preferred_segment"]
        self._replication.with_hard_pin = settings["hard_pin"]
        return client

    # -- calls, with the number of the lane, names, and where in its memory frames begin --------------

    def _exist(self, number: int, names: list[str]) -> Any:
        return self._client.batch_is_exist(names)

    def _get(self, number: int, names: list[str], begins: list[int], sizes: list[int]) -> Any:
        codes = self._client.batch_get_into(names, [self._lanes[number].address + begin for begin in begins], sizes)
        short = [name for name, code in zip(names, codes, strict=True) if 0 < code < FRAME_ALIGNMENT]
        if short:  # no frames: their deletion was cut short, see `_remove`
            self._client.batch_remove(short, True)
        return codes

    def _put(self, number: int, names: list[str], begins: list[int], lengths: list[int]) -> Any:
        """Store frames, except those that are there already, byte for byte: several engines compute one prompt.

        Mooncake's own `put` does nothing where anything is or may be stored: under a killed writer's key, for 30 s.
        """
        codes = self._client.batch_is_exist(names)
        if all(code < 0 for code in codes):
            return codes
        new = []
        for i, code in enumerate(codes):
            if code == 1 and self._is_there(number, names[i], begins[i], lengths[i]):
                codes[i] = 0
            else:
                new.append(i)
        # An object with the length of the stored one would be written in its place while it may be read. Any other
        # object gets its own memory, and the former memory is not used again while a reader may be using it.
        nbytes = [lengths[i] + 1 + secrets.randbelow(FRAME_ALIGNMENT - 1) for i in new]
        told = self._upsert(number, [names[i] for i in new], [begins[i] for i in new], nbytes)
        for i, code in zip(new, told, strict=True):
            codes[i] = code
        return codes

    def _remove(self, number: int, names: list[str]) -> Any:
        """First put one byte in place of each: removal frees the memory immediately, and readers may be using it."""
        codes = self._upsert(number, names, [0] * len(names), [1] * len(names))
        short = [i for i, code in enumerate(codes) if code == 0]
        for i, code in zip(short, self._client.batch_remove([names[i] for i in short], True), strict=True):
            codes[i] = code
        return codes

    def _upsert(self, number: int, names: list[str], begins: list[int], nbytes: list[int]) -> Any:
        places = [self._lanes[number].address + begin for begin in begins]
        return self._client.batch_upsert_from(names, places, nbytes, self._replication) if names else []

    def _is_there(self, number: int, name: str, begin: int, nbytes: int) -> bool:
        here, there = self._lanes[number].address + begin, self._others[number].address + begin
        found = self._client.get_into(name, there, nbytes + FRAME_ALIGNMENT - 1)
        return bool(found - found % FRAME_ALIGNMENT == nbytes and _memcmp(here, there, nbytes) == 0)


def main() -> None:
    store = _Store(json.loads(sys.stdin.readline()))
    store.serve()
    sys.stdin.read()
    store.close()
    os._exit(0)  # destructors of the client wait for the master


if __name__ == "__main__":
    main()
