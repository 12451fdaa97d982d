"""The example of `POST /arrange`, with the trained model of the demo."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import real_model


@pytest.mark.more
def test_arranged_prompts_have_more_cached_tokens():
    if not list(real_model.BUILD.glob("smollm2-*")) and "KVTIER_CI" not in os.environ:
        pytest.skip("there is no checkpoint: make demo")
    command = [sys.executable, real_model.ROOT / "examples" / "arrange.py"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    retrieved, _, _, arranged, *_ = done.stdout.splitlines()[-1].replace(",", "").split()
    assert int(arranged) > int(retrieved)
