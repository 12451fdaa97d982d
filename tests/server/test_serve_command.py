"""`kvtier serve` as an operator runs it, and the commands that are given the file of one of its engines."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import tempfile
from pathlib import Path

import pytest
from patience import HANG
from servers.kvtier import KVTIER
from servers.stopping import stop
from test_kills import process, server

TIERS = "version: 1\ntiers:\n  - {type: cpu, capacity: 1MiB, huge_pages: off}\n"


def kvtier(*arguments, **options):
    return subprocess.run([KVTIER, *arguments], capture_output=True, text=True, timeout=HANG, **options)


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "tiers.yaml"
    path.write_text(TIERS)
    return path


def test_serve_prints_the_setting_for_engines_and_ends_on_a_signal(file, tmp_path):
    path = tmp_path / "s"
    with process(KVTIER, "serve", "--config", file, "--socket", path, ready=f"server: unix:{path}") as running:
        assert path.stat().st_mode & 0o777 == 0o600
        running.send_signal(signal.SIGTERM)
        assert running.wait(HANG) == 0
    assert not path.exists()


def test_check_opens_the_memory_and_ends(file):
    checked = kvtier("serve", "--config", file, "--check")
    assert checked.returncode == 0 and checked.stdout.startswith("cpu: 1MiB, huge_pages: off -> off")


@pytest.mark.parametrize("capacity", ["1MiB", "2MiB"])
@pytest.mark.parametrize("there", [False, True])
def test_check_leaves_kept_memory_as_it_is(tmp_path, there, capacity):
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="check-") as home:
        keep, file = Path(home) / "kept", tmp_path / "kvtier.yaml"
        if there:
            with server(tmp_path, tmp_path / "s", keep=keep):
                assert kvtier("serve", "--probe", tmp_path / "s").returncode == 0  # the journal is written by now
        before = lying(home)
        assert len(before) == (3 if there else 0)  # the folder, its memory and its journal
        file.write_text(f"version: 1\ntiers:\n  - {{type: cpu, capacity: {capacity}, keep: {keep}}}\n")
        assert kvtier("serve", "--config", file, "--check").returncode == 0
        assert lying(home) == before


def lying(folder):
    """What no command may change."""
    found = {path: path.stat() for path in Path(folder).rglob("*")}
    return {path: (each.st_ino, each.st_size, each.st_blocks, each.st_mtime_ns) for path, each in found.items()}


def test_a_second_server_at_the_same_place_is_refused_and_one_that_was_killed_is_replaced(file, tmp_path):
    path = tmp_path / "s"
    with server(tmp_path, path) as first:
        refused = kvtier("serve", "--config", file, "--socket", path)
        assert refused.returncode == 2 and "another process serves" in refused.stderr
        first.kill()
        first.wait()
    with server(tmp_path, path):
        assert kvtier("serve", "--probe", path).returncode == 0


def test_a_probe_fails_while_the_server_is_stopped_and_when_there_is_none(tmp_path):
    path = tmp_path / "s"
    assert "No such file" in kvtier("serve", "--probe", path).stderr
    with server(tmp_path, path) as stopped:
        stop(stopped.pid)
        probed = kvtier("serve", "--probe", path)
        stopped.send_signal(signal.SIGCONT)
        assert probed.returncode == 2 and "no progress" in probed.stderr


def test_settings_of_engines_are_refused_in_its_file(tmp_path):
    path = tmp_path / "tiers.yaml"
    path.write_text(TIERS + "load_wait: 1s\nsave_decode: true\n")
    refused = kvtier("serve", "--config", path)
    assert refused.returncode == 2 and refused.stderr.count("is a setting of engines") == 2


def test_systemd_is_notified_when_it_serves_and_when_it_stops(file, tmp_path):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(tmp_path / "notify"))
        systemd.settimeout(HANG)
        environment = {**os.environ, "NOTIFY_SOCKET": str(tmp_path / "notify")}
        command = (KVTIER, "serve", "--config", file, "--socket", tmp_path / "s")
        with subprocess.Popen(command, env=environment) as running:
            assert systemd.recv(64) == b"READY=1"
            running.send_signal(signal.SIGTERM)
            assert systemd.recv(64) == b"STOPPING=1"


@pytest.mark.parametrize("command", [("doctor",), ("check", "--open")])
def test_the_file_of_an_engine_is_judged_by_its_server(tmp_path, command):
    path, file = tmp_path / "s", tmp_path / "engine.yaml"
    file.write_text(f"version: 1\nserver: unix:{path}\n")
    judged = kvtier(*command, file)
    assert bool(judged.returncode) is (command == ("doctor",)), "an engine starts without it"
    assert f"the server at {path} makes no progress" in judged.stderr
    with server(tmp_path, path):
        judged = kvtier(*command, file)
        assert judged.returncode == 0 and "no progress" not in judged.stderr
