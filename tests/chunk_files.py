"""The files in the folders of a disk tier, which may be changing them meanwhile."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from kvtier_core.frames.format import header_of
from kvtier_core.stack.store_tier.request_log import keys_beside


def sizes(folder: Path) -> dict[Path, int]:
    """The bytes of each file below a folder, in the order of their names."""
    found = {}
    for path, _, names in os.walk(folder):  # it ignores folders that are gone
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                found[Path(path, name)] = os.stat(Path(path, name)).st_size
    return dict(sorted(found.items()))


def chunk_files(folder: Path) -> list[Path]:
    """All frames of chunks below a folder, in order. Others are what the tier stores beside its chunks."""
    return [file for file in sizes(folder) if file.suffix == ".kv" and not _is_beside(file)]


def _is_beside(file: Path) -> bool:
    header = header_of(memoryview(file.read_bytes()))
    return header.key in keys_beside(header.namespace)
