from __future__ import annotations

import attrs


@attrs.frozen
class Mutant:
    """A protection of kvtier, how to take it out, and the test that must fail then."""

    name: str
    file: str
    code: str  #: stands once in the file
    instead: str
    test: str
    beside: str = ""  #: a folder of packages that the test needs, which the Makefile makes
