"""An engine that stores and loads prompts of its server until it is killed, and ends if it is given other bytes.

Those with even seeds read slabs by themselves.

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

from kvtier_core.config.compose import attach_reader
from kvtier_core.errors import BackendError
from kvtier_core.interfaces import DirectReader, Mover
from kvtier_core.server.client import RemoteStack
from kvtier_core.server.memory import served_store, served_tier
from kvtier_core.server.protocol import Opening
from kvtier_core.testing.samples import PagedBuffer, make_layout
from kvtier_core.types import ChunkKey, FrameRead, Namespace, Slot, StoredFrame

LAYOUT = make_layout((1024, 3072), 2)
NAMESPACE = Namespace.of({"model": "chaos"})
PROMPTS = [[ChunkKey(hashlib.sha256(b"%d %d" % (prompt, i)).digest()) for i in range(6)] for prompt in range(12)]
PAGES = [[[0, 1]]]


class Engine:
    """One that serves a request after the other, some of them at the same time."""

    def __init__(self, path: Path, seed: int):
        self._drawn = random.Random(seed)
        self._buffer = PagedBuffer(LAYOUT, 2, random.Random(0))
        self._stack = RemoteStack(path, Opening("model", "chaos", NAMESPACE, LAYOUT, recomputes=seed % 2 == 0))
        self._mover: Mover | None = None
        self._readers: dict[str, DirectReader] = {}
        self._has_read = False
        self._attached = 0
        self._jobs = 0

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
        handle = next(iter(self._stack.handles.values()), None)
        if handle is not None:
            try:
                self._mover = served_tier(handle).config.attach(handle, self._buffer.kv_cache())
                for name, said in self._stack.reader_handles.items():
                    self._readers[name] = attach_reader(*served_store(name, said), self._buffer.kv_cache())
            except BackendError:
                time.sleep(0.01)  # the server was killed meanwhile

    def _serve(self, path: Sequence[ChunkKey], number: int) -> None:
        self._stack.on_request(path)
        found = self._stack.lookup(path, f"request {number}").slots
        self._stack.load_begins([slot for slot in found if isinstance(slot, StoredFrame)], f"request {number}")
        unread: dict[ChunkKey, FrameRead] = {}
        for key, slot in zip(path, found, strict=False):
            if isinstance(slot, StoredFrame):
                unread |= self._read(key, slot)
            else:
                self._load(key, slot)
        self._stack.load_ended(f"request {number}", unread, ok=not unread)
        reserved = self._stack.reserve(path, f"store {number}")
        for key, slot in reserved.items():
            self._fill(key, slot)
        if self._drawn.random() < 0.9:
            self._stack.commit(f"store {number}")
        else:
            self._stack.release(f"store {number}")
        self._stack.release(f"request {number}")

    def _load(self, key: ChunkKey, slot: Slot) -> None:
        self._put(bytes(32))
        self._jobs += 1
        self._mover.load(self._jobs, [slot.index], PAGES)
        self._mover.wait([self._jobs])
        if [each.ok for each in self._mover.finished()] != [True] or self._content() != key:
            sys.exit("wrong bytes")

    def _read(self, key: ChunkKey, frame: StoredFrame) -> Mapping[ChunkKey, FrameRead]:
        """Of a frame that is not there any more no page has a byte."""
        self._put(bytes(32))
        reader = self._readers[frame.tier]
        self._jobs += 1
        reader.load(self._jobs, [frame], PAGES)
        reader.wait([self._jobs])
        (ended,) = reader.finished()
        if self._content() != (key if ended.ok else bytes(32)):
            sys.exit("wrong bytes of a slab")
        if ended.ok and not self._has_read:
            print("it has read a slab", flush=True)
            self._has_read = True
        return ended.unread

    def _fill(self, key: ChunkKey, slot: Slot) -> None:
        self._put(key)
        self._jobs += 1
        self._mover.store(self._jobs, PAGES, [slot.index])
        self._mover.wait([self._jobs])
        self._mover.finished()

    def _put(self, key: bytes) -> None:
        for layer, nbytes in enumerate(LAYOUT.groups[0].page_nbytes):
            for block in (0, 1):
                self._buffer.put(layer, block, key * (nbytes // len(key)))

    def _content(self) -> bytes:
        """The key that all pages are filled with; empty if they are not."""
        key = self._buffer.page(0, 0)[:32]
        pages = [self._buffer.page(layer, block) for layer in (0, 1) for block in (0, 1)]
        return key if all(page == key * (len(page) // 32) for page in pages) else b""


if __name__ == "__main__":
    Engine(Path(sys.argv[1]), int(sys.argv[2])).run()
