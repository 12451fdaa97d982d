"""Runs a command as a small and busy machine would: on half a core, with a disk of 20 MB/s.

    python tests/slowly.py COMMAND [ARGUMENT …]

It has one core, which it shares with a loop that never waits. Direct reads and writes of the disk that holds the folder
for temporary files are limited by a control group. Where none can be made (that takes root, and version 1 of control
groups) the disk is as fast as it is, and a line on stderr says so.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

DISK_NBYTES = 20_000_000  # a second
GROUP = Path("/sys/fs/cgroup/blkio", f"kvtier-{os.getpid()}")


def disk(folder: str) -> str:
    """The disk that holds this folder, as MAJOR:MINOR. Raises OSError if that is no disk."""
    number = os.stat(folder).st_dev
    device = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}").resolve(strict=True)
    whole = device.parent if (device / "partition").exists() else device
    return (whole / "dev").read_text().strip()


@contextlib.contextmanager
def slow_disk() -> Iterator[None]:
    """Limits the disk for this process and its children."""
    joined = GROUP.parent / "cgroup.procs"
    try:
        number = disk(tempfile.gettempdir())
        GROUP.mkdir()
        for what in ("read", "write"):
            (GROUP / f"blkio.throttle.{what}_bps_device").write_text(f"{number} {DISK_NBYTES}")
        (GROUP / "cgroup.procs").write_text(str(os.getpid()))
    except OSError as error:
        print(f"== the disk is not slowed down: {error}", file=sys.stderr)
        yield
        return
    try:
        yield
    finally:
        joined.write_text(str(os.getpid()))
        with contextlib.suppress(OSError):  # a process that the command left behind
            GROUP.rmdir()


def main(command: list[str]) -> int:
    """Returns the exit status of the command."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    rival = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        with slow_disk():
            return subprocess.run(command).returncode
    finally:
        rival.kill()
        rival.wait()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
