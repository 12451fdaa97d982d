"""The common part of all suites of laws: a config under test, excuses by name and reason; no law can be overridden."""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import json
import multiprocessing
import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import pytest

from kvtier_core.layouts import ChunkLayout
from kvtier_testing import resources
from kvtier_testing.resources import PATIENCE, Resources
from kvtier_testing.samples import make_layout

#: An installed plugin must not cost every process of the engine the import of one of these.
HEAVY = ("torch", "numpy", "vllm", "boto3", "redis", "mooncake")

_LIVES = 3

#: The type of the config under test.
Config = TypeVar("Config")

_IMPORT = """
import importlib, json, os, sys
for module in {modules!r}:
    importlib.import_module(module)
heavy = [module for module in {heavy!r} if module in sys.modules]
print(json.dumps([heavy, len(os.listdir("/proc/self/task")) if os.path.isdir("/proc/self/task") else 1]))
"""


def laws_of(suite: type[Laws]) -> list[str]:
    """The names of a suite's laws."""
    return [name for name in dir(suite) if name.startswith("test_")]


class Laws(Generic[Config]):
    """The base of all suites. A subclass says what is under test; it cannot change a law.

    A law that cannot hold for a plugin is excused by name and reason in `excused`, and pytest then reports it as
    skipped. Overriding a law raises TypeError, and so does an excuse for a law that does not exist. Further tests of
    your own are welcome in the subclass.
    """

    excused: ClassVar[Mapping[str, str]] = {}  #: name of a law -> why it cannot hold
    contract: ClassVar[str] = "kvtier_core.interfaces"  #: the module that states what is promised
    layout: ClassVar[ChunkLayout] = make_layout()  #: of the laws' chunks; a frame has 9 pages of 4 KiB or more

    def config(self, folder: Path) -> Config:
        """The config under test. The same folder means the same store, another folder another one; the folder is there.

        It is called several times for one law, and some laws send its result to another process by pickle, so it must
        be of a class at the top level of a module.
        """
        raise NotImplementedError(f"{type(self).__name__} must say which config is under test")

    def __init_subclass__(cls, **kwargs: Any):
        super().__init_subclass__(**kwargs)
        for suite in [base for base in cls.__mro__[1:] if issubclass(base, Laws)]:
            for law in laws_of(suite):
                if getattr(cls, law) is not getattr(suite, law):
                    raise TypeError(f"{cls.__name__} overrides the law {law}; excuse it instead, with a reason")
        for law, reason in cls.excused.items():
            if law not in laws_of(cls):
                raise TypeError(f"{cls.__name__} excuses {law}, which is not a law; have: {', '.join(laws_of(cls))}")
            if not reason:
                raise TypeError(f"{cls.__name__} excuses {law} without a reason")

    @pytest.fixture(autouse=True)
    def _skip_excused_laws(self, request: pytest.FixtureRequest) -> None:
        reason = self.excused.get(request.node.originalname)
        if reason is not None:
            pytest.skip(reason)

    def test_import_is_light(self, tmp_path: Path) -> None:
        """Every process of an engine imports an installed plugin, used or not: no large module, no thread.

        Otherwise every engine on the node would start later and take more memory; and a thread that runs when an engine
        forks its workers may leave them a lock that nobody opens.
        """
        modules = _light_modules(type(self.config(tmp_path)))
        imported = subprocess.run(
            [sys.executable, "-c", _IMPORT.format(modules=modules, heavy=HEAVY)],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            capture_output=True,
            text=True,
        )
        names = " and ".join(modules)
        assert imported.returncode == 0, f"importing {names} alone fails:\n{imported.stderr}"
        heavy, threads = json.loads(imported.stdout.splitlines()[-1])
        assert not heavy, f"importing {names} imports {', '.join(heavy)}; import it where `open` needs it"
        assert threads == 1, f"importing {names} starts {threads - 1} threads; start them in `open`"


class StoreLaws(Laws[Config]):
    """The laws that arenas and backends have in common. A suite has `opened`, and `_live`."""

    def opened(self, folder: Path) -> contextlib.AbstractContextManager[Any]:
        """The store under test, closed afterwards."""
        raise NotImplementedError

    def _live(self, folder: Path) -> set[str]:
        """Open the store, use it and close it. Returns the files that must be gone then."""
        raise NotImplementedError

    def test_facts_are_plain_words(self, tmp_path: Path) -> None:
        """`facts()` maps text to text.

        Otherwise the engine's log could not say what became of the user's settings.
        """
        with self.opened(tmp_path) as store:
            facts = dict(store.facts())
            assert all(isinstance(word, str) for fact in facts.items() for word in fact), (
                f"facts() maps text to text; it returned {facts}"
            )

    def test_close_twice(self, tmp_path: Path) -> None:
        """`close` may be called twice.

        Otherwise an engine that ends for another reason would end with a traceback of the plugin's instead.
        """
        with self.opened(tmp_path) as store:
            store.close()

    def test_close_gives_everything_back(self, tmp_path: Path) -> None:
        """`close` releases descriptors, threads, child processes, shared memory, and the files of an arena.

        Otherwise a process that opens stores again and again would run out of descriptors, and the node would lose the
        memory of each engine that has ended until it is booted.
        """
        if not resources.READABLE:
            pytest.skip("what a process holds is read from /proc, which is not there")
        files = set().union(*(self._live(tmp_path) for _ in range(_LIVES)))  # pools of a library fill up now
        before = Resources.now()
        files = files.union(*(self._live(tmp_path) for _ in range(_LIVES)))
        left = before.since()
        assert not left, f"after {_LIVES} times open, use and close there is more than before: {', '.join(left)}"
        left = sorted(filter(os.path.isfile, files))
        assert not left, f"close() leaves files that were written: {', '.join(left)}"


def explanation(suite: type[Laws], law: str) -> str:
    """In one paragraph: what a law is, what an engine would do with a plugin that breaks it, and where to look.

    The docstring of a law has the first two, as two paragraphs.
    """
    told = " ".join((inspect.getdoc(getattr(suite, law)) or "").split())
    where = f"the contract: python -m pydoc {suite.contract}; the laws, and how to read a failure: docs/plugins.md"
    return "\n".join(textwrap.wrap(f"{told} See {where}.", 100, break_on_hyphens=False))


def in_new_process(function: Callable[..., Any], *args: Any, hash_seed: int | None = None) -> Any:
    """The result of ``function(*args)`` in a process that shares nothing with this one but its environment.

    ``hash_seed`` decides there, as PYTHONHASHSEED, in which order sets are iterated and what `hash` returns for bytes.
    """
    with (
        pytest.MonkeyPatch.context() as patch,
        ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool,
    ):
        if hash_seed is not None:
            patch.setenv("PYTHONHASHSEED", str(hash_seed))
        return pool.submit(function, *args).result()


def kill_at_work(function: Callable[..., None], *args: Any, after: float = 0.0) -> None:
    """Call ``function(*args, pipe)`` in a new process, and kill it ``after`` seconds after it has sent something."""
    spawn = multiprocessing.get_context("spawn")
    ours, its = spawn.Pipe()
    process = spawn.Process(target=function, args=(*args, its), daemon=True)
    process.start()
    its.close()
    try:
        assert ours.poll(PATIENCE), f"a new process that should use this has done nothing for {PATIENCE:.0f} seconds"
        ours.recv()
        time.sleep(after)
    except EOFError as error:
        raise AssertionError(f"{function.__name__}() fails in a new process") from error
    finally:
        process.kill()
        process.join()
        ours.close()


def _light_modules(config_type: type) -> list[str]:
    """The module of a config, and the `plugin` beside it."""
    package = config_type.__module__.rpartition(".")[0]
    plugin = f"{package}.plugin"
    has_plugin = package and importlib.util.find_spec(plugin) is not None
    return [config_type.__module__, *([plugin] if has_plugin else [])]
