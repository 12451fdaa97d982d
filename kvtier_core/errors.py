"""The four ways kvtier can fail. A miss, a full arena and a refusal are values, not errors."""

from __future__ import annotations

from collections.abc import Sequence

import attrs


@attrs.frozen
class Problem:
    """One thing that is wrong with a configuration: where, what, and the way out."""

    where: str  #: ``kvtier.yaml:12`` or the name of an inline source
    path: str  #: ``$.tiers[2].type``
    why: str
    hint: str = ""

    def __str__(self) -> str:
        sentence = f"{self.where}: {self.path}: {self.why}"
        return f"{sentence}; {self.hint}" if self.hint else sentence


class KvtierError(Exception):
    """Whatever kvtier raises on purpose."""


class ConfigError(KvtierError):
    """The configuration cannot be served. Carries every problem found, not only the first."""

    def __init__(self, problems: Sequence[Problem]):
        self.problems = tuple(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))


class PluginError(KvtierError):
    """A plugin is broken, or two plugins offer the same name. Carries the culprit."""

    def __init__(self, plugin: str, why: str):
        self.plugin = plugin
        super().__init__(f"{plugin}: {why}")


class BackendError(KvtierError):
    """A store failed. ``retryable`` says whether the same call may succeed later."""

    def __init__(self, why: str, *, retryable: bool = True):
        self.retryable = retryable
        super().__init__(why)


class StoreFull(BackendError):
    """A store has no room for what was to be written, whatever its tier was granted. It is not broken.

    ``missing`` is how many bytes would have to be deleted before the same call can succeed, as far as it knows.
    """

    def __init__(self, why: str, *, missing: int):
        self.missing = missing
        super().__init__(why)


class ContractError(KvtierError):
    """A caller or a plugin broke a promise of the interfaces."""
