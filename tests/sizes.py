"""How long the campaigns, soaks, state machines and fuzzers of the tests are."""

import os

#: `make test` runs them in their shortest form, `make test-long` this many times as long.
LONG = int(os.environ.get("LONG", "1"))
