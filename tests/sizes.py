"""How long the tests take: a plugin of pytest, and what the tests that can be made longer import."""

import os

from hypothesis import settings

#: How many times as long as in `make test` campaigns, soaks, state machines and fuzzing are: 25 in `make test-long`.
LONG = int(os.environ.get("LONG", "1"))

# A busy machine is no failure.
settings.register_profile("default", deadline=None)
