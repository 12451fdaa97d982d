"""The base of what a fork does not close asks nothing of the classes that are derived from it, plugins' among them."""

import attrs
import pytest

from kvtier_core.forks import ProcessBound


class HasAProcess(ProcessBound):
    def __init__(self):
        self._process = "of its own"
        self.closed = []

    def close(self):
        self.closed.append("close")


class HasTheName(HasAProcess):
    closing = False


class NeedsNoSelf(ProcessBound):
    closed: list = []  # noqa: RUF012

    @staticmethod
    def close():
        NeedsNoSelf.closed.append("close")


@attrs.frozen
class Frozen(ProcessBound):
    closed: list = attrs.field(factory=list)

    def close(self):
        self.closed.append("close")


@attrs.define(slots=False)
class Plain(ProcessBound):
    closing: bool = False
    closed: list = attrs.field(factory=list)

    def close(self):
        self.closed.append("close")


@pytest.mark.parametrize("kind", [HasAProcess, HasTheName, NeedsNoSelf, Frozen, Plain])
def test_whatever_its_attributes_are_called_the_process_that_made_it_closes_it(kind):
    made = kind()
    made.close()
    assert made.closed == ["close"]
