"""A copy of the sources, to be tested in the place of those that are installed here."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
#: What finds the sources that are installed here goes before PYTHONPATH, and would test those.
_OURS_FIRST = """
import sys
sys.meta_path[:] = [finder for finder in sys.meta_path if not type(finder).__module__.startswith("_editable")]
"""
_COPIED = (
    "kvtier_core",
    "csrc",
    "plugins",
    "examples",
    "tests",
    "docs",
    "benchmarks",
    "pyproject.toml",
    "README.md",
    "Makefile",
)


class SourceCopy:
    def __init__(self, folder: Path, extension: str | Path):
        """Into an empty folder, with this file as its compiled part."""
        self.folder = folder
        for name in _COPIED:
            (shutil.copytree if (ROOT / name).is_dir() else shutil.copy)(ROOT / name, folder / name)
        shutil.copy(extension, folder / "kvtier_core")
        (folder / "sitecustomize.py").write_text(_OURS_FIRST)

    def test(
        self,
        arguments: Sequence[str],
        environment: Mapping[str, str] = os.environ,
        beside: Sequence[Path] = (),
        **options: Any,
    ) -> subprocess.CompletedProcess:
        """``pytest arguments`` in it; folders ``beside`` it have packages, too."""
        roots = [self.folder, *(self.folder / "plugins").glob("kvtier_*"), *beside]
        return subprocess.run(
            [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments],
            cwd=self.folder,
            env={**environment, "PYTHONPATH": os.pathsep.join(map(str, roots)), "PYTHONDONTWRITEBYTECODE": "1"},
            **options,
        )
