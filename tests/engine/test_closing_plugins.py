"""However a plugin's `close` is written, the core calls it once, in the process that opened the plugin, in no fork."""

import functools
import os
from typing import ClassVar

import attrs
import pytest
from empty_store import EmptyStore

from kvtier_core.config.load import load_config
from kvtier_core.config.open import open_stack
from kvtier_core.config.registry import Registry
from kvtier_core.hookspecs import hookimpl
from kvtier_core.interfaces import BackendConfig
from kvtier_testing.samples import make_context

#: Forks share it, so the parent sees what a child has closed.
_CLOSED, _CLOSES = os.pipe2(os.O_NONBLOCK)
_close_it = functools.partial(os.write, _CLOSES, b".")


class Plain(EmptyStore):
    def close(self):
        _close_it()


@attrs.define
class Slotted(Plain):
    own: str = ""

    def close(self):
        super().close()


@attrs.frozen
class Frozen(Plain):
    own: str = ""

    def close(self):
        super().close()


@attrs.define(slots=False)
class WithADict(Plain):
    closing: bool = False
    _process: str = "of its own"

    def close(self):
        super().close()


class Closes:
    def close(self):
        _close_it()


class MixedIn(Closes, EmptyStore):
    pass


class Partial(EmptyStore):
    def _end(self, how):
        assert how == "now"
        _close_it()

    close = functools.partialmethod(_end, "now")


class Compiled(EmptyStore):
    close = _close_it


class Static(EmptyStore):
    @staticmethod
    def close():
        _close_it()


class OfTheClass(EmptyStore):
    @classmethod
    def close(cls):
        _close_it()


class OfTheInstance(EmptyStore):
    def __init__(self):
        self.close = _close_it


class Computed(EmptyStore):
    @property
    def close(self):
        return _close_it


def decorated(method):
    return lambda *args: method(*args)


class Decorated(EmptyStore):
    @decorated
    def close(self):
        _close_it()


WAYS = [
    *(Plain, Slotted, Frozen, WithADict, MixedIn, Partial),
    *(Compiled, Static, OfTheClass, OfTheInstance, Computed, Decorated),
]


class Forks(EmptyStore):
    """While it opens, it forks a process in which opening fails."""

    def __init__(self):
        if not (child := os.fork()):
            raise ConnectionRefusedError
        assert os.waitpid(child, 0)[1] == 0


@attrs.frozen
class StoreConfig(BackendConfig):
    type: ClassVar[str] = "store"

    made: ClassVar[list] = []
    way: int

    def open(self, ctx):
        return self.made[self.way]()


class Plugin:
    @hookimpl
    def kvtier_backends(self):
        return [StoreConfig]


def opened(*kinds):
    """A stack with a tier of each kind."""
    StoreConfig.made[:] = kinds
    stores = [{"type": "store", "capacity": "1MiB", "way": number} for number in range(len(kinds))]
    tiers = [{"type": "heap", "capacity": "1MiB"}, *stores]
    return open_stack(load_config({"version": 1, "tiers": tiers}, Registry.of(Plugin())), make_context())


def closed():
    """How often `close` has been called since the last look."""
    try:
        return len(os.read(_CLOSED, 100))
    except BlockingIOError:
        return 0


@pytest.mark.parametrize("kind", WAYS)
def test_a_backend_is_closed_once_and_by_no_fork(kind):
    stack = opened(kind)
    if not (child := os.fork()):
        stack.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert closed() == 0
    stack.close()
    assert closed() == 1


@pytest.mark.parametrize("kind", WAYS)
def test_a_fork_of_an_opening_tier_closes_no_other(kind):
    ours = os.getpid()
    try:
        stack = opened(kind, Forks)
    finally:
        if os.getpid() != ours:
            os._exit(0)
    assert closed() == 0
    stack.close()
    assert closed() == 1
