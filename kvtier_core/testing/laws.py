"""What every suite of laws has: a config under test, excuses by name and reason, and no way around a law."""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import pytest

from kvtier_core.testing.samples import make_layout
from kvtier_core.types import ChunkLayout

#: Nobody pays for these because a plugin is installed.
HEAVY = ("torch", "numpy", "vllm", "boto3", "redis")

_IMPORT = """
import importlib, sys
for module in {modules!r}:
    importlib.import_module(module)
print(*(heavy for heavy in {heavy!r} if heavy in sys.modules))
"""


class Laws:
    """A subclass says what is under test; the laws are not its to change.

    A law that cannot hold is excused by name and reason, and is then shown as skipped. Overriding one is
    a TypeError, and so is an excuse for a law that does not exist.
    """

    excused: ClassVar[Mapping[str, str]] = {}  #: name of a law -> why it cannot hold
    layout: ClassVar[ChunkLayout] = make_layout()  #: of the chunks that the laws use; a frame has at least 9 pages

    def config(self, folder: Path) -> Any:
        """The config under test. The same folder means the same store, another folder another one."""
        raise NotImplementedError(f"{type(self).__name__} must say which config is under test")

    def __init_subclass__(cls, **kwargs: Any):
        super().__init_subclass__(**kwargs)
        for suite in [base for base in cls.__mro__[1:] if issubclass(base, Laws)]:
            for law in laws_of(suite):
                if getattr(cls, law) is not getattr(suite, law):
                    raise TypeError(f"{cls.__name__} overrides the law {law}; excuse it instead, with a reason")
        for law, reason in cls.excused.items():
            if law not in laws_of(cls):
                raise TypeError(f"{cls.__name__} excuses {law}, which is no law; have: {', '.join(laws_of(cls))}")
            if not reason:
                raise TypeError(f"{cls.__name__} excuses {law} without a reason")

    @pytest.fixture(autouse=True)
    def _skip_what_is_excused(self, request: pytest.FixtureRequest) -> None:
        reason = self.excused.get(request.node.originalname)
        if reason is not None:
            pytest.skip(reason)

    def test_import_is_light(self, tmp_path: Path):
        modules = _light_modules(type(self.config(tmp_path)))
        script = _IMPORT.format(modules=modules, heavy=HEAVY)
        imported = subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            capture_output=True,
            text=True,
        )
        assert imported.returncode == 0, imported.stderr
        assert imported.stdout.split() == [], f"importing {modules} imports {imported.stdout.strip()}"


def laws_of(suite: type[Laws]) -> list[str]:
    """The names of a suite's laws."""
    return [name for name in dir(suite) if name.startswith("test_")]


def in_new_process(function: Callable[..., Any], *args: Any) -> Any:
    """The result of ``function(*args)`` in a process that has nothing of this one but its environment."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *args).result()


def _light_modules(config_type: type) -> list[str]:
    """The module of a config, and the `plugin` beside it."""
    package = config_type.__module__.rpartition(".")[0]
    plugin = f"{package}.plugin"
    has_plugin = package and importlib.util.find_spec(plugin) is not None
    return [config_type.__module__, *([plugin] if has_plugin else [])]
