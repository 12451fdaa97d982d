"""Loads the compiled extension, if it was built from the sources that belong to this Python code.

Each name in it has a counterpart in Python, which is used when nothing could be compiled. The two are never mixed: an
extension that was compiled from other sources, as the digest in it (its stamp) shows, is not used at all.
"""

from __future__ import annotations

import hashlib
import importlib
from pathlib import Path
from types import ModuleType
from typing import TypeVar

T = TypeVar("T")

_PACKAGE = Path(__file__).parent
#: Exists only in a checkout, where the Python code may be newer than the compiled code.
_SOURCES = _PACKAGE.parent / "csrc"


def stamp_of(sources: Path) -> str:
    """The digest of sources, as csrc/stamp.cmake computes it; empty if there are none."""
    files = {path.relative_to(sources).as_posix(): path for path in sources.rglob("*") if _counts(path, sources)}
    listing = "".join(f"{hashlib.sha256(files[name].read_bytes()).hexdigest()} {name}\n" for name in sorted(files))
    return hashlib.sha256(listing.encode()).hexdigest() if files else ""


def _counts(path: Path, sources: Path) -> bool:
    """Is this a source of the library that is compiled from this folder? CUDA code has a separate library."""
    is_source = path.suffix in (".cpp", ".h", ".cu", ".cmake") or path.name == "CMakeLists.txt"
    return is_source and path.relative_to(sources).parts[0] != "cuda"


def expected_stamp(name: str = "_native", folder: str = ".") -> str:
    """The stamp of the library that belongs to this Python code, by its name and the folder of its sources in csrc."""
    try:  # written beside this file when a wheel is built
        return (_PACKAGE / f"{name}.stamp").read_text("ascii", "replace").strip()
    except OSError:
        return stamp_of(_SOURCES / folder)


def _load() -> tuple[ModuleType | None, str]:
    """The extension, or None and the reason why it is not used."""
    try:
        found = importlib.import_module("kvtier_core._native")
    except ImportError as error:
        return None, f"the native extension is missing; using Python instead, which is slower: {error}"
    stamp = getattr(found, "stamp", "")
    if stamp and stamp == expected_stamp():
        return found, ""
    stale = "the native extension was built from different sources; using Python instead, which is slower"
    return None, f"{stale}: rebuild {found.__file__}"


extension, _why_not = _load()


def choose(name: str, plain: T) -> T:
    """The object of this name in the extension, or its counterpart in Python if there is no extension.

    Raises AttributeError for a name that the extension lacks.
    """
    return plain if extension is None else getattr(extension, name)


def describe() -> str:
    """A log line that states whether the extension is used."""
    return _why_not if extension is None else f"compiled; checksums by {extension.crc32_method()}"
