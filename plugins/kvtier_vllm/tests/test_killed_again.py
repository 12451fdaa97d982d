"""An engine that is killed again and again starts every time, and what it leaves behind does not grow."""

from __future__ import annotations

import os
import re
import signal

import pytest
from chunk_files import chunk_files, sizes
from other_engine import beside
from patience import wait_until
from real_engines import cpu_and_disk, prompt
from sizes import LONG

ASKED = prompt(300, 530)


@pytest.mark.more
def test_what_killed_engines_leave_does_not_grow(fork_server, model, tmp_path):
    runtime, disk, left = tmp_path / "run", tmp_path / "disk", []
    runtime.mkdir(mode=0o700)
    for number in range(25 * LONG):
        with beside(fork_server, model, cpu_and_disk(disk), runtime=runtime) as engine:
            engine.ask(ASKED)
            assert engine.outcome.loaded == (512 if number else 0)
            wait_until(lambda: len(chunk_files(disk)) == 8)
            os.kill(engine.pid, signal.SIGKILL)
            wait_until(lambda pid=engine.pid: not os.path.exists(f"/proc/{pid}"))
        left.append([re.sub(r"status-\d+", "status", str(file.relative_to(tmp_path))) for file in sizes(tmp_path)])
    assert left[-1] == left[0], "each cleans up after the one before it"
