"""A stack as its file describes it, of real memory and real folders, and an engine that asks it for whole prompts."""

from __future__ import annotations

import hashlib
import random
from pathlib import Path

from patience import HANG

import kvtier_cpu.plugin
import kvtier_disk.plugin
from kvtier_core.config.load import load_config
from kvtier_core.config.open import Runtime, open_stack
from kvtier_core.config.registry import Registry
from kvtier_testing.samples import PagedBuffer, make_context, make_layout

#: Payloads of whole pages, so that no byte of a frame is mere padding.
BLOCKS = 4
LAYOUT = make_layout((1024, 3072), BLOCKS)
FRAME = LAYOUT.frame_nbytes


class Serving:
    """Each request is a second later than the one before."""

    def __init__(self, file: Path, *plugins):
        config = load_config(file, Registry.of(kvtier_cpu.plugin, kvtier_disk.plugin, *plugins))
        self._now = 0.0
        self.manager = open_stack(config, make_context(layout=LAYOUT), Runtime(clock=lambda: self._now))
        self._buffer = PagedBuffer(LAYOUT, BLOCKS, random.Random(0))
        self._mover = config.arenas[0].config.attach(next(iter(self.manager.handles.values())), self._buffer.kv_cache())
        self._pages = [[list(range(BLOCKS))]]
        self.copies = 0  # of chunks, from pages to slots or back
        self.seen = set()  # kinds of events

    def __enter__(self):
        return self

    def __exit__(self, *raised):
        self.close()

    def ask(self, path):
        """One request, until all of it has come to rest. How many of its chunks came back, each with its bytes."""
        self._now += 1.0
        self.manager.on_request(path)
        slots = self.look_up(path)
        for key, slot in zip(path, slots, strict=False):
            self._check(key, slot)
        self.manager.release("request")
        if reserved := self.manager.reserve(path, "request"):
            for key, slot in reserved.items():
                self._fill(key, slot)
            self.manager.commit("request")
        self.settle()
        return len(slots)

    def look_up(self, path):
        """The slots of the leading chunks that are READY when nothing is on its way any more."""
        while (found := self.manager.lookup(path, "request")).pending:
            self.settle()
        return found.slots

    def wait(self, seconds):
        """Nothing is asked for so long, and then what was due is done."""
        self._now += seconds
        self.manager.step()
        self.settle()

    def settle(self):
        self._note(self.manager.drain(HANG))
        assert not self.manager.jobs

    def close(self):
        self._mover.close()
        self._note(self.manager.close(HANG))

    def _note(self, events):
        self.seen.update(event.kind.value for event in events)

    def _fill(self, key, slot):
        for layer, block, nbytes in _pages():
            self._buffer.put(layer, block, _page(key, layer, block, nbytes))
        self._mover.store(self._job(), self._pages, [slot.index])
        self._end()

    def _check(self, key, slot):
        self._mover.load(self._job(), [slot.index], self._pages)
        self._end()
        for layer, block, nbytes in _pages():
            assert self._buffer.page(layer, block) == _page(key, layer, block, nbytes), "other bytes came back"

    def _job(self):
        self.copies += 1
        return self.copies

    def _end(self):
        self._mover.wait([self.copies])
        assert [ended.ok for ended in self._mover.finished()] == [True]


def files(folder):
    """All, but those that hold the facts of namespaces, and the lock."""
    beside = "namespace.json", ".kvtier-lock"
    return sorted(file for file in folder.rglob("*") if file.is_file() and file.name not in beside)


def _pages():
    pages = enumerate(LAYOUT.groups[0].page_nbytes)
    return [(i, block, nbytes) for i, nbytes in pages for block in range(BLOCKS)]


def _page(key, layer, block, nbytes):
    return hashlib.shake_128(key + bytes([layer, block])).digest(nbytes)
