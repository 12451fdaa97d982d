"""Real vLLM over files that are opened to others while it stores and loads: what they forge changes no answer."""

from __future__ import annotations

import os
import random
import sys
import threading
from collections import Counter
from contextlib import suppress

import pytest
from opened import forge, kubelet_opens
from real_engines import CHUNK, Engine, cpu, prompt
from sizes import LONG
from test_serving import NOISE

from kvtier_core.frames.format import header_of
from kvtier_core.types import FRAME_ALIGNMENT, FRAME_HEADER_NBYTES, FRAME_MAGIC
from kvtier_testing.samples import make_keys

PROMPTS = [prompt(700 + i, 330) for i in range(3)]
CHUNKS = 5  # of each prompt
ROOM = "8MiB"  # of memory
STORES = {
    "disk": {"type": "disk", "min_free": "0B"},
    "a shared disk": {"type": "disk", "shared": True, "min_free": "0B"},
    "slabs": {"type": "gds"},
    "slabs that workers read": {"type": "gds", "staging": ROOM, "mode": "gds"},
}
ROUNDS = 4 * LONG
#: Where files are read and written, and the threads that do it.
ROOMS = "/kvtier_disk/", "/kvtier_gds/", "/storekit/", "/store_tier/"


class Strangers:
    """They open a folder to themselves before line ``moment`` of kvtier's, and from then on forge what they can.

    The lines are those of all threads that begin in the context, and of this one.
    """

    def __init__(self, folder, moment):
        self.folder = folder
        self.left = moment
        self.lines = 0
        self._files = {}
        self._one = threading.RLock()

    def __enter__(self):
        threading.settrace(self._trace)
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_):
        sys.settrace(None)
        threading.settrace(None)
        for file in self._files.values():
            os.close(file)

    def _trace(self, frame, event, _):
        name = frame.f_code.co_filename
        if "/tests/" in name or not any(room in name for room in ROOMS):
            return None
        if event == "line":
            with self._one:
                self.lines += 1
                if self.lines == self.left and self.folder.exists():
                    kubelet_opens(self.folder)
                    self.forge()
        return self._trace

    def forge(self):
        """Every frame in files that are open to them, or were when they opened them."""
        for path in [each for each in self.folder.rglob("*") if each.is_file()]:
            with suppress(FileNotFoundError):
                told = path.stat()
                if told.st_mode & 0o060 == 0o060 and told.st_ino not in self._files:
                    self._files[told.st_ino] = os.open(path, os.O_RDWR)
        for file in self._files.values():
            for at in range(0, os.fstat(file).st_size, FRAME_ALIGNMENT):
                header = os.pread(file, FRAME_HEADER_NBYTES, at)
                if header.startswith(FRAME_MAGIC) and len(header) == FRAME_HEADER_NBYTES:
                    forge(file, at, FRAME_HEADER_NBYTES + header_of(memoryview(header)).payload_nbytes)


@pytest.fixture(scope="module")
def truth(model):
    """What an engine without kvtier answers."""
    plain = Engine(model, None)
    answers = plain.ask(*PROMPTS)
    plain.close()
    return answers


def stack(store, folder):
    path = {"paths": [str(folder)]} if store["type"] == "gds" else {"path": str(folder)}
    above = cpu(ROOM)
    return {**above, "tiers": [*([] if "staging" in store else above["tiers"]), {"capacity": "64MiB", **store, **path}]}


@pytest.mark.more
@pytest.mark.parametrize("store", STORES.values(), ids=STORES)
def test_no_forged_frame_is_loaded_whenever_files_are_opened(engine, tmp_path, truth, store):
    """At any step of stores and loads, whose lines are drawn."""
    drawn = random.Random(str(store))
    lines, loaded = 0, Counter()
    for number in range(1 + ROUNDS):
        folder = tmp_path / str(number)
        moment = drawn.randrange(1, lines) if number else 0
        with Strangers(folder, moment) as strangers, engine(stack(store, folder)) as served:
            for _ in range(3):
                for asked, right in zip(PROMPTS, truth, strict=True):
                    (answer,) = served.ask(asked)
                    assert answer.differs(right) < NOISE, (number, moment)
                    served.settle()
                    strangers.forge()
                crowd_out(served)
            for outcome in served.outcomes():
                loaded.update(outcome.tiers)
        lines = lines or strangers.lines
        if not number:
            assert loaded == {store["type"]: 2 * len(PROMPTS) * CHUNKS * CHUNK}, "files are not what is loaded"
    print(f"{ROUNDS} rounds over {lines} lines, tokens loaded: {dict(loaded)}")


def crowd_out(served):
    """Empty the memory, so that only files can answer."""
    served.manager.reserve(make_keys(1000), "crowd")
    served.manager.release("crowd")
