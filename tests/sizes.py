"""How long the tests take: a plugin of pytest, and what the tests that can be made longer import."""

import contextlib
import os

#: How many times as long as in `make test` campaigns, soaks, state machines and fuzzing are: 25 in `make test-long`.
LONG = int(os.environ.get("LONG", "1"))

# Read when torch is imported, which tests/core does before tests/vllm/conftest.py. Threads that wait spin.
os.environ.setdefault("OMP_NUM_THREADS", "1")

with contextlib.suppress(ImportError):  # for `make gpu-check` it need not be installed
    from hypothesis import settings

    settings.register_profile("default", deadline=None)  # a busy machine is no failure
