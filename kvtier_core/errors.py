"""The errors of kvtier. A miss, a full arena and a rejection are values, not errors."""

from __future__ import annotations

from collections.abc import Sequence

import attrs


@attrs.frozen
class Problem:
    """One problem of a configuration: its location, its reason, and the way out."""

    where: str  #: file and line, ``kvtier.yaml:12``; or the name of an inline source
    path: str  #: the setting: ``$.tiers[2].type``
    why: str
    hint: str = ""

    def __str__(self) -> str:
        sentence = f"{self.where}: {self.path}: {self.why}"
        return f"{sentence}; {self.hint}" if self.hint else sentence


class KvtierError(Exception):
    """The base of all errors that kvtier raises on purpose."""


class ConfigError(KvtierError):
    """A configuration cannot be used. ``problems`` holds all problems, not only the first."""

    def __init__(self, problems: Sequence[Problem]):
        self.problems = tuple(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))


class BackendError(KvtierError):
    """A store, an arena, a mover or a serializer failed."""


class Gone(BackendError):
    """An entry that a store listed is gone, or was replaced."""


class StoreFull(BackendError):
    """A store has no room for a write, although its tier is within its capacity. The store is not broken."""

    def __init__(self, why: str, *, missing: int):
        """``missing`` bytes must be deleted before the same call can succeed, according to the store."""
        self.missing = missing
        super().__init__(why)


class Unanswered(BackendError):
    """A server did not answer. It may do so later."""


class ContractError(KvtierError):
    """A caller or a plugin violates an interface."""
