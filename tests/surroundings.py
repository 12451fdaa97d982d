"""What tests do not take from the machine that they run on: a plugin of pytest."""

import contextlib
import os

# Read when torch is imported, which tests/core does before tests/vllm/conftest.py. Threads that wait spin.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Many tests make folders for tiers. Those that others may write to are refused.
os.umask(0o022)

with contextlib.suppress(ImportError):  # for `make gpu-check` it need not be installed
    from hypothesis import settings

    settings.register_profile("default", deadline=None)  # a busy machine is no failure
