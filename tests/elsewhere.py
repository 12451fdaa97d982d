"""Runs a command as it would run on another machine, or as another user.

    python tests/elsewhere.py CONDITION[,CONDITION …] COMMAND [ARGUMENT …]

The conditions are:

    one-core    on one core
    busy        beside a loop on each core that never waits
    slow-disk   with a disk of 20 MB/s; takes root and version 1 of control groups
    offline     in a network namespace that has the loopback alone; takes root
    user        as `nobody`, in a clone that belongs to it; takes root
    path        in a clone behind a symbolic link, at a path of 200 characters with spaces and letters beyond ASCII
    tmpfs       with the folder for temporary files in memory; takes root
    small-shm   with 64 MiB in `/dev/shm`, as containers have it; takes root
    umask       with files that the user's group may write to
    home        with an empty HOME that has a space and a letter beyond ASCII in its name
    locale      where text files are in ISO-8859-1 unless their encoding is named
    time-zone   12 hours and 45 minutes east of Greenwich

A clone is one of this checkout's last commit, with a `.venv` of its own.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
DISK_NBYTES = 20_000_000  # a second
GROUP = Path("/sys/fs/cgroup/blkio", f"kvtier-{os.getpid()}")
NOBODY = ("setpriv", "--reuid=nobody", "--regid=nogroup", "--clear-groups")

#: Commands that run the command behind them in a condition.
INSIDE = {
    "one-core": ("taskset", "--cpu-list", str(min(os.sched_getaffinity(0)))),
    "offline": ("unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"),
    "umask": ("sh", "-c", 'umask 002 && exec "$@"', "sh"),
    "small-shm": ("unshare", "--mount", "sh", "-c", 'mount -t tmpfs -o size=64m tmpfs /dev/shm && exec "$@"', "sh"),
    "tmpfs": ("unshare", "--mount", "sh", "-c", 'mount -t tmpfs tmpfs /mnt && TMPDIR=/mnt exec "$@"', "sh"),
    "time-zone": ("env", "TZ=Pacific/Chatham"),
}
CLONES = ("user", "path")
CONDITIONS = (*INSIDE, *CLONES, "busy", "slow-disk", "home", "locale")
#: Characters of a clone's path in the condition `path`.
LONG = 200


@contextlib.contextmanager
def busy(cores: set[int]) -> Iterator[None]:
    """A loop on each of these cores."""
    pinned = [("taskset", "--cpu-list", str(core)) for core in cores]
    loops = [subprocess.Popen((*taskset, sys.executable, "-c", "while True: pass")) for taskset in pinned]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


@contextlib.contextmanager
def slow_disk() -> Iterator[None]:
    """Limits direct I/O on the disk with the folder for temporary files, for this process and its children."""
    try:
        number = disk(tempfile.gettempdir())
        GROUP.mkdir()
        for what in ("read", "write"):
            (GROUP / f"blkio.throttle.{what}_bps_device").write_text(f"{number} {DISK_NBYTES}")
        (GROUP / "cgroup.procs").write_text(str(os.getpid()))
    except OSError as error:
        print(f"== the disk keeps its speed: {error}", file=sys.stderr)
        yield
        return
    try:
        yield
    finally:
        (GROUP.parent / "cgroup.procs").write_text(str(os.getpid()))
        with contextlib.suppress(OSError):  # a process that the command left behind
            GROUP.rmdir()


def disk(folder: str) -> str:
    """The disk that holds this folder, as MAJOR:MINOR. Raises OSError if that is no disk."""
    number = os.stat(folder).st_dev
    device = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}").resolve(strict=True)
    whole = device.parent if (device / "partition").exists() else device
    return (whole / "dev").read_text().strip()


@contextlib.contextmanager
def new_folder(name: str) -> Iterator[Path]:
    """An empty folder that everybody can reach."""
    with tempfile.TemporaryDirectory(prefix="kvtier-") as parent:
        os.chmod(parent, 0o755)
        folder = Path(parent, name)
        folder.mkdir()
        yield folder


@contextlib.contextmanager
def latin() -> Iterator[dict[str, str]]:
    """The variables of a locale in which text is not in UTF-8, and every byte is a letter: torch reads its files so."""
    name = "en_US.ISO-8859-1"
    with new_folder("locales") as folder:
        subprocess.run(("localedef", "--inputfile=en_US", "--charmap=ISO-8859-1", folder / name), check=True)
        yield {"LOCPATH": str(folder), "LC_ALL": name, "PYTHONUTF8": "0"}


def clone(conditions: list[str], folder: Path) -> Path:
    """Clone this checkout into an empty folder; returns the clone, or a link to it."""
    place = checkout = folder / "kvtier"
    if "path" in conditions:
        above = folder / "a plåce with spaces"
        above.mkdir()
        checkout = above / "kvtier".rjust(LONG - len(f"{above}/"), "_")
        place.symlink_to(checkout)
    subprocess.run(("git", "clone", "--quiet", ROOT, checkout), check=True)
    if "user" in conditions:
        subprocess.run(("chown", "--recursive", "nobody:nogroup", folder), check=True)
    return place


def main(conditions: list[str], command: list[str]) -> int:
    """Returns the exit status of the command."""
    with contextlib.ExitStack() as closing:
        where, environment = ROOT, dict(os.environ)
        inside = [word for condition in conditions for word in INSIDE.get(condition, ())]
        if "home" in conditions or "user" in conditions:
            home = closing.enter_context(new_folder("höme of its own"))
            environment["HOME"] = str(home)
            if "user" in conditions:
                shutil.chown(home, "nobody", "nogroup")
        if not set(CLONES).isdisjoint(conditions):
            folder = closing.enter_context(new_folder("of a clone"))
            where = clone(conditions, folder)
            environment["PWD"] = str(where)  # the link, as in a shell
            environment.pop("KVTIER_CI", None)  # some tests would need what `make demo` leaves
            user = NOBODY if "user" in conditions else ()
            subprocess.run((*user, "make", "venv"), check=True, cwd=where, env=environment)
            inside += user
        if "locale" in conditions:
            environment |= closing.enter_context(latin())
        if "slow-disk" in conditions:
            closing.enter_context(slow_disk())
        if "busy" in conditions:
            cores = os.sched_getaffinity(0)
            closing.enter_context(busy({min(cores)} if "one-core" in conditions else cores))
        return subprocess.run((*inside, *command), cwd=where, env=environment).returncode


if __name__ == "__main__":
    what, *command = sys.argv[1:]
    conditions = what.split(",")
    if unknown := set(conditions).difference(CONDITIONS):
        sys.exit(f"unknown conditions: {', '.join(sorted(unknown))}; known: {', '.join(CONDITIONS)}")
    sys.exit(main(conditions, command))
