"""The compiled half of kvtier. Each thing in it has a plain counterpart, which is used where it could not be built."""

from __future__ import annotations

from types import ModuleType

extension: ModuleType | None
try:
    from kvtier_core import _native as extension  # type: ignore[attr-defined, no-redef]
except ImportError as error:
    extension = None
    _why = str(error)


def describe() -> str:
    """One line for the log."""
    if extension is None:
        return f"nothing is compiled, all is slower: {_why}"
    return f"compiled; checksums by {extension.crc32_method()}"
