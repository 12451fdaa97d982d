"""An engine that stores and loads prompts of its server until it is killed, and ends if it is given other bytes.

Now and then its weights change: the bytes of a chunk are those that the oracle says for its epoch. Engines with even
seeds read slabs by themselves.

python chaos_engine.py SOCKET SEED
"""

from __future__ import annotations

import contextlib
import hashlib
import random
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from oracle import kv_of

from kvtier_core.config.attach import attach_reader
from kvtier_core.errors import BackendError
from kvtier_core.interfaces import DirectReader, Mover
from kvtier_core.types import EPOCH, ChunkKey, FrameRead, Namespace, Slot, StoredFrame
from kvtier_remote.client import RemoteStack
from kvtier_remote.memory import served_store, served_tier
from kvtier_remote.protocol import Opening
from kvtier_testing.samples import PagedBuffer, make_layout

LAYOUT = make_layout((1024, 3072), 2)
#: Of epochs that several engines are in at the same time, and come back to.
NAMESPACES = [Namespace.of({"model": "chaos", EPOCH: number}) for number in range(3)]
PROMPTS = [[ChunkKey(hashlib.sha256(b"%d %d" % (prompt, i)).digest()) for i in range(6)] for prompt in range(12)]
PAGES = [[[0, 1]]]
_NOTHING = bytes(LAYOUT.payload_nbytes)


class Engine:
    """One that serves a request after the other, some of them at the same time."""

    def __init__(self, path: Path, seed: int):
        self._drawn = random.Random(seed)
        self._buffer = PagedBuffer(LAYOUT, 2, random.Random(0))
        self._namespace = NAMESPACES[0]
        self._stack = RemoteStack(path, Opening("model", "chaos", NAMESPACES[0], LAYOUT, recomputes=seed % 2 == 0))
        self._mover: Mover | None = None
        self._readers: dict[str, DirectReader] = {}
        self._has_read = False
        self._attached = 0
        self._jobs = 0
        self._kept: dict[str, tuple[dict[ChunkKey, Slot | StoredFrame], bytes]] = {}  # by request, with its epoch

    def run(self) -> None:
        """Until the end."""
        number = 0
        while True:
            number += 1
            self._stack.step()
            if self._stack.attachment != self._attached:
                self._attach()
            if self._mover is not None:
                with contextlib.suppress(BackendError):  # the server was killed, and its memory may be another one's
                    self._serve(self._drawn.choice(PROMPTS), number)

    def _attach(self) -> None:
        for each in (*self._readers.values(), *([self._mover] if self._mover else [])):
            each.close()
        self._mover, self._readers, self._attached = None, {}, self._stack.attachment
        for request in self._kept:  # what was found before cannot be loaded any more
            self._stack.release(request)
        self._kept.clear()
        handle = next(iter(self._stack.handles.values()), None)
        if handle is not None:
            try:
                self._mover = served_tier(handle).config.attach(handle, self._buffer.kv_cache())
                for name, said in self._stack.reader_handles.items():
                    self._readers[name] = attach_reader(*served_store(name, said), self._buffer.kv_cache())
            except BackendError:
                time.sleep(0.01)  # the server was killed meanwhile

    def _serve(self, path: Sequence[ChunkKey], number: int) -> None:
        request, store, epoch = f"request {number}", f"store {number}", self._namespace.digest
        self._stack.on_request(path)
        found = self._stack.lookup(path, request).slots
        self._kept[request] = dict(zip(path, found, strict=False)), epoch
        reserved = self._stack.reserve(path, store)
        if self._drawn.random() < 0.02:
            self._namespace = self._drawn.choice([each for each in NAMESPACES if each != self._namespace])
            self._stack.invalidate_all(self._namespace)
        while len(self._kept) > self._drawn.randrange(4):
            self._load_all(self._drawn.choice(list(self._kept)))
        for key, slot in reserved.items():
            self._fill(kv_of(key, epoch, LAYOUT.payload_nbytes), slot)
        if reserved and self._drawn.random() < 0.9:
            self._stack.commit(store)
        else:
            self._stack.release(store)

    def _load_all(self, request: str) -> None:
        found, epoch = self._kept.pop(request)
        self._stack.load_begins([slot for slot in found.values() if isinstance(slot, StoredFrame)], request)
        unread: dict[ChunkKey, FrameRead] = {}
        for key, slot in found.items():
            kv = kv_of(key, epoch, LAYOUT.payload_nbytes)
            if isinstance(slot, StoredFrame):
                unread |= self._read(kv, slot)
            else:
                self._load(kv, slot)
        self._stack.load_ended(request, unread, ok=not unread)
        self._stack.release(request)

    def _load(self, kv: bytes, slot: Slot) -> None:
        self._put(_NOTHING)
        self._jobs += 1
        self._mover.load(self._jobs, [slot.index], PAGES)
        self._mover.wait([self._jobs])
        if [each.ok for each in self._mover.finished()] != [True] or self._content() != kv:
            sys.exit("wrong bytes")

    def _read(self, kv: bytes, frame: StoredFrame) -> Mapping[ChunkKey, FrameRead]:
        """Of a frame that is not there any more no page has a byte."""
        self._put(_NOTHING)
        reader = self._readers[frame.tier]
        self._jobs += 1
        reader.load(self._jobs, [frame], PAGES)
        reader.wait([self._jobs])
        (ended,) = reader.finished()
        if self._content() != (kv if ended.ok else _NOTHING):
            sys.exit("wrong bytes of a slab")
        if ended.ok and not self._has_read:
            print("it has read a slab", flush=True)
            self._has_read = True
        return ended.unread

    def _fill(self, kv: bytes, slot: Slot) -> None:
        self._put(kv)
        self._jobs += 1
        self._mover.store(self._jobs, PAGES, [slot.index])
        self._mover.wait([self._jobs])
        self._mover.finished()

    def _put(self, kv: bytes) -> None:
        for layer, nbytes in enumerate(LAYOUT.groups[0].page_nbytes):
            for block in (0, 1):
                self._buffer.put(layer, block, kv[:nbytes])
                kv = kv[nbytes:]

    def _content(self) -> bytes:
        """Of all pages."""
        return b"".join(self._buffer.page(layer, block) for layer in (0, 1) for block in (0, 1))


if __name__ == "__main__":
    Engine(Path(sys.argv[1]), int(sys.argv[2])).run()
