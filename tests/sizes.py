"""How long the tests take: a plugin of pytest, and what the tests that can be made longer import."""

import os

from hypothesis import settings

#: `make test` runs campaigns, soaks, state machines and fuzzing in a short form, `make test-long` this many times as long.
LONG = int(os.environ.get("LONG", "1"))

# A busy machine is no failure.
settings.register_profile("default", deadline=None)
