"""A socket belongs to one process, whoever starts at the same time, and whatever a kill has left there."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from opened import before_line
from sizes import some

from kvtier_core.storekit import owner_socket

RACERS, ROUNDS = 8, 12
#: The user who stands for those that a user namespace has no number for.
NOBODY = int(Path("/proc/sys/kernel/overflowuid").read_text())


def racer(path: Path, gate: int, opening: int, verdicts: int) -> int:
    """A process that listens at ``path``, if it may, as soon as the gate opens, until it is killed."""
    child = os.fork()
    if child:
        return child
    try:
        os.close(opening)
        os.read(gate, 1)
        try:
            listener = owner_socket.listen(path, 128)
        except OSError as error:
            os.write(verdicts, b"in use\n" if "another process serves" in str(error) else f"{error}\n".encode())
        else:
            os.write(verdicts, b"listens\n")
            signal.pause()
            listener.close()
    finally:
        os._exit(0)


@pytest.mark.parametrize("sweeps", some([False, True], True))
def test_of_many_that_start_over_an_abandoned_socket_one_listens(tmp_path, sweeps):
    path = tmp_path / "s"
    for _ in range(ROUNDS):
        (gate, opening), (verdict, verdicts) = os.pipe(), os.pipe()
        children = [racer(path, gate, opening, verdicts) for _ in range(RACERS)]
        os.close(opening)
        os.close(verdicts)
        try:
            for _ in range(100 * sweeps):
                owner_socket.sweep(tmp_path, "s")
            said = b""
            while said.count(b"\n") < RACERS:
                said += os.read(verdict, 4096)
            assert sorted(said.split(b"\n")[:-1]) == [b"in use"] * (RACERS - 1) + [b"listens"]
            with socket.socket(socket.AF_UNIX) as client:
                client.connect(str(path))
            assert os.listdir(tmp_path) == ["s"], "the lock stays"
        finally:
            for child in children:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
            os.close(gate)
            os.close(verdict)


def test_a_name_is_there_when_its_owner_listens_and_nobody_else_may_connect(tmp_path):
    """Before each line of its opening, whatever the umask."""
    path, line, lines = tmp_path / "s", 0, 1

    def look():
        for entry in os.scandir(tmp_path):
            assert not entry.stat().st_mode & 0o077
        with socket.socket(socket.AF_UNIX) as client:
            if path.exists():
                client.connect(str(path))

    def opens():
        owner_socket.listen(path, 8).close()

    before = os.umask(0)
    try:
        while line < lines:
            lines = before_line(line, look, opens)
            line += 1
    finally:
        os.umask(before)
    assert lines > 10


def test_another_file_of_that_name_stays_as_it_is(tmp_path):
    (tmp_path / "s").write_text("precious")
    (tmp_path / "s").chmod(0o644)
    with pytest.raises(OSError, match="in use"):
        owner_socket.listen(tmp_path / "s", 1)
    assert (tmp_path / "s").read_text() == "precious" and (tmp_path / "s").stat().st_mode & 0o777 == 0o644
    assert os.listdir(tmp_path) == ["s"]


def test_what_a_process_left_that_was_killed_before_it_listened_is_swept(tmp_path):
    for swept in (True, False):
        with socket.socket(socket.AF_UNIX) as killed:
            killed.bind(str(tmp_path / "~"))
        if swept:
            owner_socket.sweep(tmp_path, "s")
        else:
            owner_socket.listen(tmp_path / "s", 1).close()
        assert not os.listdir(tmp_path)


def test_the_lock_of_a_killed_process_keeps_no_one_away(tmp_path):
    (tmp_path / "s.lock").touch()
    owner_socket.listen(tmp_path / "s", 1).close()
    assert not os.listdir(tmp_path)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes files of others")
def test_a_lock_of_another_user_is_not_waited_for(tmp_path):
    (tmp_path / "s.lock").touch()
    os.chown(tmp_path / "s.lock", 12345, 12345)
    with pytest.raises(PermissionError, match="belongs to another user"):
        owner_socket.listen(tmp_path / "s", 1)


INSIDE = """
import os, socket
from kvtier_core.storekit import owner_socket
ours, theirs = socket.socket(socket.AF_UNIX), socket.socket(socket.AF_UNIX)
ours.bind("ours")
os.chmod("ours", 0o777)
ours.listen()
print("listens", flush=True)
client, _ = ours.accept()
theirs.connect("theirs")
for other in (client, theirs):
    print(os.geteuid(), owner_socket.admits(other), owner_socket.stranger(other))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may act as another user")
def test_who_is_outside_of_a_user_namespace_is_not_the_user_whose_number_he_has_in_it():
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        os.chmod(folder, 0o777)  # a stranger reaches it
        with socket.socket(socket.AF_UNIX) as theirs, socket.socket(socket.AF_UNIX) as client:
            with a_stranger():
                theirs.bind("theirs")
                theirs.listen()
            os.chmod("theirs", 0o777)
            code = ["unshare", "--user", f"--map-user={NOBODY}", sys.executable, "-c", INSIDE]
            with subprocess.Popen(code, stdout=subprocess.PIPE, text=True) as inside:
                if inside.stdout.readline() != "listens\n":
                    pytest.skip("no user namespace can be made here")
                with a_stranger():
                    client.connect("ours")
                said = inside.stdout.read().splitlines()
    assert len(said) == 2
    for line in said:
        assert re.fullmatch(rf"{NOBODY} False process \d+ of user {NOBODY}, who may be any user .*", line), line


@contextlib.contextmanager
def a_stranger():
    os.seteuid(12345)
    try:
        yield
    finally:
        os.seteuid(0)
