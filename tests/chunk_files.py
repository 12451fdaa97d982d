"""The frames of chunks in the folders of a disk tier."""

from __future__ import annotations

from pathlib import Path

from kvtier_core.frames.format import header_of
from kvtier_core.stack.store_tier.request_log import keys_beside


def chunk_files(folder: Path) -> list[Path]:
    """All of them below a folder, in order. Other files there are what the tier stores beside its chunks."""
    return [file for file in sorted(folder.rglob("*.kv")) if not _is_beside(file)]


def _is_beside(file: Path) -> bool:
    header = header_of(memoryview(file.read_bytes()))
    return header.key in keys_beside(header.namespace)
