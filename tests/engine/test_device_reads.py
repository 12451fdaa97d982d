"""Frames that are read into the memory of a GPU: in a process of its own, where the driver of the tests is found."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
from fake_cuda import libraries


@pytest.mark.skipif(importlib.util.find_spec("kvikio") is None, reason="KvikIO is not installed")
def test_frames_that_are_read_into_the_memory_of_a_gpu():
    _, driver = libraries()
    tests = Path(__file__).with_name("device_reads.py")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tests)],
        env={**os.environ, "LD_LIBRARY_PATH": str(driver.parent)},
        capture_output=True,
        text=True,
    )
    assert not done.returncode, done.stdout[-8000:] + done.stderr[-2000:]
    assert "skipped" not in done.stdout
