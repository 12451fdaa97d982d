"""Runs programs as the processes of a pod, in which no process is root outside and volumes are as kubelet makes them.

``python pods.py SPEC`` prints a list with the output of each step, as JSON; it exits with `CANNOT` and the reason where
there are no such namespaces. SPEC is `Pod.spec`.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import socket
import stat
import struct
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

import attrs
import pytest
from patience import HANG

ROOT = Path(__file__).parents[1]
#: Exit status of a machine without user namespaces, or without the right to map users into one.
CANNOT = 77
#: OpenShift runs each project under users and groups of a range of its own.
OPENSHIFT = 1000680000
_NEWNS, _NEWUSER, _NEWNET = 0x00020000, 0x10000000, 0x40000000
_SIOCSIFFLAGS, _IFF_UP = 0x8914, 1
#: The user outside that is root inside.
_OUTSIDE = 100000
#: First number inside, first outside, how many.
_MAP = f"0 {_OUTSIDE} 65536\n{OPENSHIFT} {2 * _OUTSIDE} 1\n"
_NEW_ROOT = Path("/mnt")

_libc = ctypes.CDLL(None, use_errno=True)


@attrs.define
class Pod:
    """A container with volumes. Each call adds a step; `run` runs all of them, in order."""

    owner: int
    group: int
    mode: int
    at: str = "/cache"
    others: dict[str, tuple[int, int, int]] = attrs.field(factory=dict)  #: owner, group and mode of others, by path
    read_only: bool = False  #: may the container write nowhere but in its volumes?
    steps: list[dict] = attrs.field(factory=list)

    def process(self, code: str, uid: int, gid: int | None = None, groups: tuple[int, ...] = (), **env: str) -> None:
        """Run Python code as this user."""
        gid = uid if gid is None else gid
        self.steps.append({"code": code, "uid": uid, "gid": gid, "groups": groups, "env": env})

    def kubelet_opens(self, group: int) -> None:
        """Let kubelet give the volume to a group again, as at each start of a pod (SetVolumeOwnership)."""
        code = f"""
import os, stat
for folder, _, files in os.walk({self.at!r}):
    for path in (folder, *(os.path.join(folder, name) for name in files)):
        status = os.lstat(path)
        os.chown(path, -1, {group}, follow_symlinks=False)
        more = 0o2770 if stat.S_ISDIR(status.st_mode) else 0o660
        os.chmod(path, stat.S_IMODE(status.st_mode) | more)
"""
        self.process(code, 0)

    def run(self) -> list[str]:
        """What each step wrote. Skips the test where a pod cannot be had."""
        spec = json.dumps(attrs.asdict(self))
        done = subprocess.run([sys.executable, __file__, spec], capture_output=True, text=True, timeout=HANG)
        if done.returncode == CANNOT:
            pytest.skip(done.stderr.strip())
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)


def _main(spec: dict) -> None:
    try:
        _unshare(_NEWNS)
        _make_root()
    except OSError as error:
        _cannot(f"only root can make a pod: {error}")
    unshared, mapped = os.pipe(), os.pipe()
    if not (child := os.fork()):
        os.close(mapped[1])
        _unshare(_NEWUSER | _NEWNS | _NEWNET)
        os.write(unshared[1], b".")
        if os.read(mapped[0], 1):
            _contain(spec)
            print(json.dumps([_step(step) for step in spec["steps"]]), flush=True)
        os._exit(0)
    os.close(unshared[1])
    if not os.read(unshared[0], 1):
        _cannot("no user namespace can be made here")
    for name in ("uid_map", "gid_map"):
        Path(f"/proc/{child}/{name}").write_text(_MAP)
    os.write(mapped[1], b".")
    _, status = os.waitpid(child, 0)
    sys.exit(os.waitstatus_to_exitcode(status))


def _cannot(why: str) -> NoReturn:
    print(why, file=sys.stderr)
    sys.exit(CANNOT)


def _unshare(what: int) -> None:
    if _libc.unshare(what) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _make_root() -> None:
    """The root folder of the container: this machine's folders, and Python where others cannot reach it."""
    _mount("--make-rprivate", "/")
    folders = [entry for entry in os.scandir("/") if entry.name not in ("tmp", "mnt")]
    _mount("-t", "tmpfs", "-o", "mode=0755", "tmpfs", str(_NEW_ROOT))
    os.chown(_NEW_ROOT, _OUTSIDE, _OUTSIDE)
    for entry in folders:
        inside = f"{_NEW_ROOT}/{entry.name}"
        if entry.is_symlink():
            os.symlink(os.readlink(entry), inside)
        elif entry.is_dir():
            os.mkdir(inside)
            _mount("--rbind", entry.path, inside)
    for needed in (ROOT, Path(sys.prefix), Path(sys.base_prefix)):
        for above in reversed(needed.parents):
            inside = _NEW_ROOT / above.relative_to("/")
            if not inside.exists():  # of the container's root: it sets the mode of /tmp
                inside.mkdir()
                os.chown(inside, _OUTSIDE, _OUTSIDE)
            if not inside.stat().st_mode & stat.S_IXOTH:
                _mount("-t", "tmpfs", "-o", "mode=0755", "tmpfs", str(inside))
        if not (inside := _NEW_ROOT / needed.relative_to("/")).exists():
            inside.mkdir()
            _mount("--bind", str(needed), str(inside))


def _contain(spec: dict) -> None:
    """Make this process root of the container, with its volumes and its loopback."""
    os.setgid(0)
    os.setgroups([])
    os.setuid(0)
    os.chroot(_NEW_ROOT)
    os.chdir("/")
    os.makedirs("/tmp", exist_ok=True)  # it is there if the project lies in it
    os.chmod("/tmp", 0o1777)
    with socket.socket() as any_socket:
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", _IFF_UP))
    volumes = {spec["at"]: (spec["owner"], spec["group"], spec["mode"]), **spec["others"]}
    for path, (owner, group, mode) in volumes.items():
        if not os.path.exists(path):
            above = os.path.dirname(path)
            if above != "/":  # the machine's
                _mount("-t", "tmpfs", "-o", "mode=0755", "tmpfs", above)
            os.mkdir(path)
        _mount("-t", "tmpfs", "volume", path)
        os.chown(path, owner, group)
        os.chmod(path, mode)
    if spec["read_only"]:
        _mount("-o", "remount,bind,ro", "/")


def _mount(*words: str) -> None:
    subprocess.run(["mount", *words], check=True, stdout=sys.stderr)


def _step(step: dict) -> str:
    paths = os.environ.get("PYTHONPATH"), step["env"].get("PYTHONPATH")  # `SourceCopy` sets the first
    environment = {"PATH": os.environ["PATH"], "HOME": "/nowhere", "PYTHONDONTWRITEBYTECODE": "1", **step["env"]}
    done = subprocess.run(
        [sys.executable, "-c", step["code"]],
        user=step["uid"],
        group=step["gid"],
        extra_groups=step["groups"],
        umask=0o022,
        env={**environment, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    return done.stdout.strip()


if __name__ == "__main__":
    _main(json.loads(sys.argv[1]))
