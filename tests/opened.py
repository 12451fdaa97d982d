"""Files that others may read and write while a store uses them, as kubelet makes them at the start of another pod."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvtier_core.errors import BackendError
from kvtier_core.frames.checksum import crc32
from kvtier_core.frames.format import header_of, payload_of, write_header


def kubelet_opens(folder: Path) -> None:
    """Open everything in a volume to its group (SetVolumeOwnership); here the group is this user's own."""
    for path in (folder, *folder.rglob("*")):
        path.chmod(path.stat().st_mode | (0o2770 if path.is_dir() else 0o660))


def somebody_closes(folder: Path) -> None:
    """As chmod -R go-rwx does; whoever has a file open keeps it."""
    for path in (folder, *folder.rglob("*")):
        path.chmod(stat.S_IMODE(path.stat().st_mode) & ~0o077)


def forge(file: int, at: int, nbytes: int) -> None:
    """Give the frame there another payload, with the right checksums."""
    frame = memoryview(bytearray(os.pread(file, nbytes, at)))
    header, payload = header_of(frame), payload_of(frame)
    payload[:] = b"forged" * (len(payload) // 6) + bytes(len(payload) % 6)
    write_header(frame, header._replace(payload_checksum=crc32(payload), decoded_checksum=crc32(payload)))
    os.pwrite(file, frame, at)


def attempt(call: Callable[..., Any], *args: Any) -> Any:
    """What the call returns, or the BackendError that it raises."""
    try:
        return call(*args)
    except BackendError as error:
        return error


def before_line(number: int, act: Callable[[], object], work: Callable[[], object]) -> int:
    """Run ``work``, and ``act`` before line ``number`` of what kvtier does in it, or behind the last.

    Returns how many lines there are, which is not the same each time.
    """
    seen = 0

    def trace(frame: Any, event: str, _: Any) -> Any:
        nonlocal seen
        name = frame.f_code.co_filename
        if "/kvtier_" not in name or "/tests/" in name:
            return None
        if event == "line":
            if seen == number:
                act()
            seen += 1
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    if seen <= number:
        act()
    return seen
