"""Engines and their server are killed or stopped at random moments, again and again: 1000 times in `make chaos`.

What engines load is compared with an oracle, by key and epoch (chaos_engine.py). At the end every slot is free.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from chaos_engine import LAYOUT, NAMESPACES
from patience import wait_until
from served import PATIENT
from servers.stopping import stopped
from sizes import LONG, some
from test_kills import server

from kvtier_remote.client import RemoteStack
from kvtier_remote.protocol import Opening
from kvtier_testing.samples import make_keys

KILLS = 10 if LONG == 1 else 40 * LONG
ENGINES = 3
SCRIPT = Path(__file__).with_name("chaos_engine.py")


def engine(path, seed, told):
    """It appends what it says to a file."""
    with told.open("a") as output:
        return subprocess.Popen([sys.executable, SCRIPT, path, str(seed)], stdout=output)


def memory_of(pid):
    """KiB of a process, without what it maps of files."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))


def slabs(folder):
    """They have room for half of the prompts, and the memory above them for a quarter."""
    room = f"{36 * LAYOUT.frame_nbytes}B"
    return {"type": "gds", "paths": [str(folder / "slabs")], "mode": "gds", "capacity": room, "eviction": "lru"}


def may_have(stack, slots):
    """All slots of the server: nobody else has one, once the stacks of other epochs are closed."""
    stack.step()
    reserved = stack.reserve(make_keys(slots), "all")
    stack.release("all")
    return len(reserved) == slots


@pytest.mark.long
@pytest.mark.parametrize(
    ("below", "kept"), some(itertools.product(["nothing", "slabs"], ["not kept", "kept"]), ("slabs", "kept"))
)
def test_no_kill_harms_those_who_live(below, kept, tmp_path):
    drawn, path, told = random.Random(0), tmp_path / "kvtier.sock", tmp_path / "told"
    stores = [slabs(tmp_path)] if below == "slabs" else []
    slots = 18 if stores else 84
    with contextlib.ExitStack() as closing:
        keep = Path(closing.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm"))) if kept == "kept" else None
        options = {"capacity": f"{slots * LAYOUT.frame_nbytes}B", "keep": keep}
        running = closing.enter_context(server(tmp_path, path, *stores, **options))
        engines = [engine(path, seed, told) for seed in range(ENGINES)]
        for number in range(KILLS):
            with stopped(drawn.choice([running, *engines]).pid) if drawn.random() < 0.3 else contextlib.nullcontext():
                time.sleep(drawn.uniform(0.0, 0.8))
            assert all(each.poll() is None for each in engines), "an engine was given other bytes"
            if number % 10 == 9:
                running.kill()
                running.wait()
                running = closing.enter_context(server(tmp_path, path, *stores, **options))
            else:
                killed = drawn.randrange(ENGINES)
                engines[killed].send_signal(signal.SIGKILL)
                engines[killed].wait()
                engines[killed] = engine(path, ENGINES + number, told)
        survivor = RemoteStack(path, Opening("model", "survivor", NAMESPACES[0], LAYOUT), PATIENT)
        wait_until(lambda: not survivor.step() and survivor.usage() and survivor.usage()[0].chunks, "nothing is stored")
        wait_until(lambda: ("it has read a slab" in told.read_text()) == bool(stores))
        assert all(each.poll() is None for each in engines), "an engine was given other bytes"
        for each in engines:
            each.kill()
            each.wait()
        wait_until(lambda: not survivor.step() and survivor.usage() and not survivor.usage()[0].pins)
        survivor.invalidate_all(NAMESPACES[0].renewed())
        wait_until(lambda: may_have(survivor, slots), "slots are lost")
        assert len(os.listdir(f"/proc/{running.pid}/fd")) < 30 and memory_of(running.pid) < 200 << 10
        survivor.close()
