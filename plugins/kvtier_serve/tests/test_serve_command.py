"""`kvtier serve` as an operator runs it, and the commands that are given the file of one of its engines."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import signal
import socket
import subprocess
import tempfile
from pathlib import Path

import pytest
from disks import tmpfs
from patience import HANG
from servers.kvtier import KVTIER
from servers.stopping import stop
from sizes import every_third, some
from test_kills import process, server

from kvtier_serve.operators.access import TOKEN

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
    assert checked.returncode == 0 and checked.stdout.startswith("cpu: 1MiB; huge pages off")


KEPT = "{{type: cpu, capacity: {capacity}, huge_pages: off, keep: {home}/kept}}"
CHECKED = {
    "the-same": (KEPT, 0),
    "another-capacity": (KEPT.replace("{capacity}", "2MiB"), 0),
    "too-large": (KEPT.replace("{capacity}", "1PiB"), 2),
    "huge-pages": (KEPT.replace("off", "auto"), 0),
    "not-kept": (KEPT.replace(", keep: {home}/kept", ""), 0),
    "with-a-disk": (KEPT + "\n  - {{type: disk, path: {home}/disk, capacity: 1MiB}}", 0),
    "with-a-shared-disk": (KEPT + "\n  - {{type: disk, path: {home}/disk, capacity: 1MiB, shared: true}}", 0),
    "with-slabs": (KEPT + "\n  - {{type: gds, paths: ['{home}/gds'], capacity: 1MiB}}", 0),
}


@pytest.mark.parametrize("there", [False, True], ids=["nothing-there", "memory-there"])
@pytest.mark.parametrize("which", every_third(list(CHECKED)))
def test_a_check_changes_nothing(tmp_path, which, there):
    tiers, code = CHECKED[which]
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="check-") as home:
        file = tmp_path / "kvtier.yaml"
        if there:
            with server(tmp_path, tmp_path / "s", keep=Path(home) / "kept"):
                assert kvtier("serve", "--probe", tmp_path / "s").returncode == 0  # the journal is written by now
            for each in ("disk", "gds"):
                (Path(home) / each).mkdir(mode=0o700)
        file.write_text(f"version: 1\ntiers:\n  - {tiers.format(home=home, capacity='1MiB')}\n")
        before = lying(home), os.statvfs(home).f_files
        assert len(before[0]) == (7 if there else 1)  # with the memory, its journal and its lock
        assert kvtier("serve", "--config", file, "--check").returncode == code
        assert (lying(home), os.statvfs(home).f_files) == before


def lying(folder):
    """What no command may change."""
    found = {path: path.stat() for path in (Path(folder), *Path(folder).rglob("*"))}
    contents = {path: hashlib.sha256(path.read_bytes()).digest() for path in found if path.is_file()}
    kept = {path: (each.st_ino, each.st_mode, each.st_size, each.st_blocks) for path, each in found.items()}
    return {path: (*kept[path], found[path].st_mtime_ns, found[path].st_ctime_ns, contents.get(path)) for path in found}


AT_START = {
    "memory": ([], True),
    "a-socket-in-a-folder-that-is-missing": (["--socket", "{home}/nowhere/s"], False),
    "a-socket-at-a-file": (["--socket", "{home}/file"], False),
    "a-socket-that-a-server-has": (["--socket", "{home}/served"], False),
    "a-socket-whose-path-is-too-long": (["--socket", "{home}/" + 100 * "s"], False),
    "operators-at-a-port": (["--http", "127.0.0.1:0"], True),
    "operators-at-a-port-in-use": (["--http", "127.0.0.1:{port}"], False),
    "operators-at-another-socket": (["--http", "unix:{home}/operators"], True),
    "operators-at-a-file": (["--http", "unix:{home}/file"], False),
    "a-certificate-that-is-missing": (["--http", "127.0.0.1:0", "--http-cert", "{home}/nowhere"], False),
    "quotas-that-are-none": (["--quotas", "{home}/file"], False),
    "a-keep-that-is-a-file": (["{home}/file"], False),
    "a-keep-of-everybody": (["{home}/everybodys"], False),
    "memory-that-kvtier-did-not-make": (["{home}/others"], False),
    "a-lock-that-is-a-folder": (["{home}/lockless"], False),
}


@pytest.mark.parametrize("which", every_third(list(AT_START)))
def test_a_check_agrees_with_a_start_and_changes_nothing(tmp_path, which):
    options, good = AT_START[which]
    with contextlib.ExitStack() as closing:
        home = Path(closing.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm", prefix="agrees-")))
        (home / "file").write_text("a file")
        for name in "everybodys", "others", "lockless/.kvtier-lock":
            (home / name).mkdir(parents=True)
            (home / name).parent.chmod(0o700)
            (home / name).chmod(0o777 if name == "everybodys" else 0o700)
        (home / "others/memory").write_text("another program's")
        port = closing.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1]
        if "served" in str(options):
            closing.enter_context(server(tmp_path, home / "served"))
        options = [each.format(home=home, port=port) for each in options]
        keep = f", keep: {options.pop()}" if len(options) == 1 else ""
        (home / "kvtier.yaml").write_text(TIERS.replace("}", f"{keep}}}"))
        environment = {**os.environ, "XDG_RUNTIME_DIR": str(home)}
        command = ["serve", "--config", home / "kvtier.yaml", "--socket", home / "s", *options]
        before = lying(home)
        checked = kvtier(*command, "--check", env=environment)
        assert lying(home) == before
        assert checked.returncode == (0 if good else 2), checked.stderr
        if good:
            with process(KVTIER, *command, ready="ready; in an engine's file", env=environment):
                return
        started = kvtier(*command, env=environment)
        assert started.returncode == 2
        assert started.stderr.splitlines()[-1] == checked.stderr.splitlines()[-1]


@pytest.mark.parametrize("what", some(["disk", "gds", "memory"]))
def test_a_second_server_with_the_folder_of_a_first_is_refused_at_its_start(tmp_path, what):
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="second-") as home:
        (folder := Path(home) / "of-one").mkdir(mode=0o700)
        keep = folder if what == "memory" else None
        tier = {
            "type": what,
            "capacity": "1MiB",
            **({"paths": [str(folder)]} if what == "gds" else {"path": str(folder)}),
        }
        with server(tmp_path, tmp_path / "s", *([] if keep else [tier]), keep=keep):
            before = lying(home)
            for options in (["--check"], []):
                command = "serve", "--config", tmp_path / "kvtier.yaml", "--socket", tmp_path / "another", *options
                refused = kvtier(*command)
                assert refused.returncode == 2
                assert f"{folder}: another engine or tier keeps its frames here" in refused.stderr
            assert lying(home) == before
        again = kvtier("serve", "--config", tmp_path / "kvtier.yaml", "--check")
        assert again.returncode == 0, "the lock ends with the server"


@pytest.mark.more
def test_kept_memory_without_room_for_its_journal_is_refused(tmp_path):
    with tmpfs(tmp_path, 16 << 20) as small:
        keep, file = small.folder / "kept", tmp_path / "kvtier.yaml"
        before = lying(small.folder)
        for capacity, code in (("16MiB", 2), ("9MiB", 2), ("7MiB", 0)):
            file.write_text(f"version: 1\ntiers:\n  - {KEPT.format(capacity=capacity, home=small.folder)}\n")
            for options in ["--check"], [] if code else ["--check"]:
                checked = kvtier("serve", "--config", file, "--socket", tmp_path / "s", *options)
                assert checked.returncode == code and ("and 8MiB for the journal do not fit" in checked.stderr) == bool(
                    code
                )
                assert lying(small.folder) == before and not keep.exists()


def test_a_second_server_at_the_same_place_is_refused_and_one_that_was_killed_is_replaced(file, tmp_path):
    path = tmp_path / "s"
    with server(tmp_path, path) as first:
        refused = kvtier("serve", "--config", file, "--socket", path)
        assert refused.returncode == 2 and "another process serves" in refused.stderr
        first.kill()
        first.wait()
    with server(tmp_path, path):
        assert kvtier("serve", "--probe", path).returncode == 0


def test_a_command_prints_the_link_to_the_page_which_has_the_token(file, tmp_path):
    command = (KVTIER, "serve", "--config", file, "--socket", tmp_path / "s", "--http", "127.0.0.1:0")
    environment = {**os.environ, TOKEN: "hunter2 & 3"}
    with process(*command, ready="operators with the token ask", env=environment):
        printed = kvtier("serve", "--link", tmp_path / "s.http")
    assert re.fullmatch(r"http://127.0.0.1:\d+/#hunter2%20%26%203\n", printed.stdout)
    assert "no server answers" in kvtier("serve", "--link", tmp_path / "s.http").stderr


@pytest.mark.parametrize("address", ["8100", ":8100", "127.0.0.1", "127.0.0.1:99999", "127.0.0.1:x"])
def test_a_malformed_address_is_refused_with_a_reason(file, tmp_path, address):
    refused = kvtier("serve", "--config", file, "--socket", tmp_path / "s", "--http", address)
    assert refused.returncode == 2 and "is not an address; write one such as 127.0.0.1:8100" in refused.stderr


def test_a_path_that_is_too_long_for_operators_keeps_no_engine_away(file, tmp_path):
    path = tmp_path / "s".ljust(105 - len(str(tmp_path)), "s")
    with process(KVTIER, "serve", "--config", file, "--socket", path, ready="operators are not answered: "):
        assert path.exists()


def test_operators_may_be_answered_at_a_socket_elsewhere(file, tmp_path):
    there = tmp_path / "there"
    command = (KVTIER, "serve", "--config", file, "--socket", tmp_path / "s", "--http", f"unix:{there}")
    with process(*command, ready=f"operators of this user ask unix:{there}"):
        assert there.stat().st_mode & 0o777 == 0o600 and not (tmp_path / "s.http").exists()


@pytest.mark.more
def test_a_probe_fails_while_the_server_is_stopped_and_when_there_is_none(tmp_path):
    path = tmp_path / "s"
    assert "No such file" in kvtier("serve", "--probe", path).stderr
    with server(tmp_path, path) as stopped:
        stop(stopped.pid)
        probed = kvtier("serve", "--probe", path)
        stopped.send_signal(signal.SIGCONT)
        assert probed.returncode == 2 and "did not respond in time" in probed.stderr


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
    assert f"the server at {path} did not respond in time" in judged.stderr
    with server(tmp_path, path):
        judged = kvtier(*command, file)
        assert judged.returncode == 0 and "did not respond" not in judged.stderr
