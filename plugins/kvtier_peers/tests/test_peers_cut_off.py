"""Two nodes in network namespaces of their own, and a cable between them that is pulled without a word to either.

The reader's part runs as a program, in a namespace in which this user may do so.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from needs import needs
from patience import HANG
from sizes import some

_READER, _OWNER, _PORT = "10.77.0.1", "10.77.0.2", 7710
_NAMESPACE = ("unshare", "--user", "--map-root-user", "--net")


@pytest.mark.parametrize("when", some(["mid-frame", "idle"]))
def test_a_cable_that_is_pulled_is_a_miss_and_is_found_again(tmp_path, when):
    """While nothing is sent, and in the middle of a frame. Each call returns after the peer's patience."""
    if subprocess.run([*_NAMESPACE, "true"], capture_output=True).returncode:
        pytest.skip("this user may make no network namespaces here")
    needs("iproute2", shutil.which("ip") and shutil.which("tc"))
    environment = {**os.environ, "TOKEN": "a secret of thirty-two characters", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [*_NAMESPACE, sys.executable, __file__, "read", str(tmp_path), when],
        env=environment,
        text=True,
        capture_output=True,
        timeout=HANG,
    )
    assert done.returncode == 0, done.stderr


# -- in the namespaces -------------------------------------------------------------------------------


class Cable:
    """Between this namespace and that of another process, at 400 Mbit/s."""

    def __init__(self, other: int):
        self._there = ("nsenter", f"--net=/proc/{other}/ns/net")
        _run("ip", "link", "add", "name", "here", "type", "veth", "peer", "name", "there", "netns", str(other))
        for where, name, address in (((), "here", _READER), (self._there, "there", _OWNER)):
            _run(*where, "ip", "link", "set", "lo", "up")
            _run(*where, "ip", "address", "add", f"{address}/24", "dev", name)
            _run(*where, "ip", "link", "set", name, "up")
            _run(*where, *f"tc qdisc add dev {name} root tbf rate 400mbit burst 256kb latency 100ms".split())

    def pull(self) -> None:
        _run(*self._there, "ip", "link", "set", "there", "down")

    def plug(self) -> None:
        _run(*self._there, "ip", "link", "set", "there", "up")


def _run(*command: str) -> None:
    subprocess.run(command, check=True)


def _frames():
    from kvtier_testing.samples import make_frame, make_keys

    return {key: make_frame(key, 16 << 20) for key in make_keys(2)}


def _show(folder: str) -> None:
    from nodes import Memory, open_node

    from kvtier_core.types import EnvSecret

    memory = Memory(Path(folder))
    for key, frame in _frames().items():
        memory.put(key, frame)
    sys.stdin.readline()  # until there is a cable
    with contextlib.closing(open_node(memory, listen=f"{_OWNER}:{_PORT}", token=EnvSecret("TOKEN"))):
        sys.stdin.readline()


def _read(folder: str, when: str) -> None:
    command = ["unshare", "--net", sys.executable, __file__, "show", folder]
    with subprocess.Popen(command, stdin=subprocess.PIPE, text=True) as owner:
        try:
            _read_from(owner, when)
        finally:
            owner.kill()


def _read_from(owner: subprocess.Popen, when: str) -> None:
    from nodes import open_node
    from patience import HANG, wait_until

    from kvtier_core.errors import BackendError
    from kvtier_core.types import EnvSecret, Seconds

    frames = _frames()
    keys, nbytes = list(frames), len(next(iter(frames.values())))
    into = [memoryview(bytearray(nbytes)) for _ in keys]
    inside = f"/proc/{owner.pid}/ns/net"
    wait_until(lambda: os.readlink(inside) != os.readlink("/proc/self/ns/net"))
    cable = Cable(owner.pid)
    owner.stdin.write("\n")
    owner.stdin.flush()
    token, patience = EnvSecret("TOKEN"), 1.0
    node = open_node(listen=f"{_READER}:{_PORT}", peers=[f"{_OWNER}:{_PORT}"], token=token, patience=Seconds(patience))
    with contextlib.closing(node):
        wait_until(lambda: all(node.contains(keys)))
        assert list(node.read(keys, into)) == [nbytes] * len(keys)
        assert into == list(frames.values())
        if when == "idle":
            cable.pull()
        else:
            threading.Timer(0.1, cable.pull).start()  # a frame takes 0.3 s
        for view in into:
            view[:] = bytes(nbytes)
        begun = time.monotonic()
        counts = node.read(keys, into)
        assert time.monotonic() - begun < HANG  # TCP itself gives up after a quarter of an hour
        for key, count, view in zip(keys, counts, into, strict=True):
            assert not isinstance(count, int) or count == 0 or view == frames[key]
        assert any(isinstance(count, BackendError) for count in counts), counts
        cable.plug()
        wait_until(lambda: all(node.contains(keys)))
        assert list(node.read(keys, into)) == [nbytes] * len(keys)
        assert into == list(frames.values())


if __name__ == "__main__":
    {"read": _read, "show": _show}[sys.argv[1]](*sys.argv[2:])
