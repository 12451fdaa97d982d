"""Programs that run beside a server: started, read, started again, and ended with it."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import sys
from pathlib import Path

import pytest
from patience import HANG, wait_until
from servers.kvtier import KVTIER
from test_kills import process
from test_serve_command import TIERS, kvtier

from kvtier_core.config.load import load_config
from kvtier_core.config.model import ProgramConfig
from kvtier_core.config.registry import Registry
from kvtier_core.errors import ConfigError
from kvtier_serve import programs
from kvtier_serve.operators.asking import RunningServer
from kvtier_serve.programs import Programs

SLEEPS = ["sleep", "1000"]
#: It asks for the health of its server over the operators' socket.
ASKS = """
import os, socket
http = socket.socket(socket.AF_UNIX)
http.connect(os.environ["KVTIER_HTTP"].removeprefix("unix:"))
http.sendall(b"GET /health HTTP/1.0\\r\\n\\r\\n")
print(http.recv(100).decode().splitlines()[0])
"""


class Served:
    """A server of its own process, with programs."""

    def __init__(self, folder):
        self.file, self.socket, self._log = folder / "kvtier.yaml", folder / "s", folder / "log"
        self.process = None

    def write(self, **commands):
        written = [{"name": name, "command": command} for name, command in commands.items()]
        self.file.write_text(f"{TIERS}programs: {json.dumps(written)}\n")

    @contextlib.contextmanager
    def run(self, **commands):
        self.write(**commands)
        command = KVTIER, "serve", "--config", self.file, "--socket", self.socket
        with self._log.open("w") as errors, process(*command, ready="server: unix:", stderr=errors) as self.process:
            yield self

    def log(self):
        return self._log.read_text()

    def look(self):
        """The programs by their names, as operators see them."""
        told = RunningServer.at_socket(self.socket.with_name("s.http")).ask("GET", "/status")["programs"]
        return {each["name"]: each for each in told}

    def running(self, name):
        """The process of a program, once it runs."""
        return wait_until(lambda: self.look()[name]["process"])


@pytest.fixture
def served(tmp_path):
    return Served(tmp_path)


@pytest.fixture
def ours(caplog):
    """Programs of this process, whose log is in ``caplog``."""
    caplog.set_level(logging.INFO, "kvtier")
    made = Programs()
    yield made
    made.close()


def begin(ours, *command, name="it", told=os.environ):
    ours.begin([ProgramConfig(name, tuple(map(str, command)))], told)


def script(text):
    return "sh", "-c", text


def runs(pid):
    """Is it a process that has not ended?"""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def numbers(caplog, word):
    """The numbers of processes that a program has printed after this word."""
    lines = [record.getMessage() for record in caplog.records]
    return [int(line.split()[-1]) for line in lines if f": {word} " in line]


# -- beside a server -------------------------------------------------------------------------------------


def test_a_program_starts_when_the_server_answers_and_learns_where_it_is(served, tmp_path, monkeypatch):
    monkeypatch.setenv("KVTIER_CONFIG", "of an engine")
    monkeypatch.chdir(tmp_path)
    served.file, served.socket = Path("kvtier.yaml"), Path("s")
    with served.run(asks=[sys.executable, "-c", ASKS], tells=script("env; exec sleep 1000")):
        wait_until(lambda: "kvtier: program asks: HTTP/1.1 200 OK" in served.log())
        told = ("SOCKET", tmp_path / "s"), ("HTTP", f"unix:{tmp_path / 's.http'}")
        for name, value in (*told, ("SERVE_CONFIG", tmp_path / "kvtier.yaml"), ("CONFIG", "of an engine")):
            wait_until(lambda line=f"kvtier: program tells: KVTIER_{name}={value}\n": line in served.log())


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL], ids=lambda how: how.name)
def test_programs_end_with_their_server(served, how):
    with served.run(one=SLEEPS, another=SLEEPS):
        pids = [served.running(name) for name in ("one", "another")]
        assert all(map(runs, pids))
        served.process.send_signal(how)
        assert served.process.wait(HANG) == (-how if how == signal.SIGKILL else 0)
        wait_until(lambda: not any(map(runs, pids)))


def test_a_program_that_is_killed_is_started_again(served):
    with served.run(it=SLEEPS):
        killed = served.running("it")
        os.kill(killed, signal.SIGKILL)
        wait_until(lambda: served.look()["it"]["starts"] == 2)
        assert served.running("it") != killed
        told = served.look()["it"]
        assert (told["ends"], told["last_end"]) == (1, "signal 9")
        wait_until(lambda: "kvtier: program it: signal 9; next start in 1 s" in served.log())


def test_a_program_that_cannot_be_started_is_told_and_keeps_no_server_from_serving(served):
    with served.run(lacks=["/no/such/program"], runs=SLEEPS):
        served.running("runs")
        wait_until(lambda: served.look()["lacks"]["ends"])
        why = "cannot be started: No such file or directory"
        wait_until(lambda: f"kvtier: program lacks: {why}; next start in 1 s" in served.log())
        shown = kvtier("serve", "status", "--socket", served.socket)
        assert shown.returncode == 1 and f"program lacks: does not run, last end: {why}" in shown.stdout
        assert f"program runs: process {served.running('runs')}" in shown.stdout
        assert kvtier("serve", "--probe", served.socket).returncode == 0


def test_a_reload_ends_starts_and_replaces_programs(served):
    with served.run(stays=SLEEPS, goes=SLEEPS, differs=SLEEPS):
        before = {name: served.running(name) for name in ("stays", "goes", "differs")}
        served.write(stays=SLEEPS, comes=SLEEPS, differs=["sleep", "2000"])
        reloaded = kvtier("serve", "reload", "--socket", served.socket)
        assert reloaded.returncode == 0
        assert reloaded.stdout.splitlines() == [
            "changed: program comes: started",
            "changed: program differs: replaced",
            "changed: program goes: ended",
        ]
        assert served.look().keys() == {"stays", "comes", "differs"} and served.running("comes")
        wait_until(lambda: not runs(before["goes"]) and not runs(before["differs"]))
        assert served.running("stays") == before["stays"] and served.running("differs") != before["differs"]
        served.write(stays=[])
        assert kvtier("serve", "reload", "--socket", served.socket).returncode == 2
        assert served.running("stays") == before["stays"]


# -- their lives -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("steady", [False, True], ids=["ends-at-once", "ran-for-a-while"])
def test_pauses_double_until_the_longest_and_begin_anew(ours, caplog, monkeypatch, steady):
    monkeypatch.setattr(programs, "_FIRST_PAUSE", 0.01)
    monkeypatch.setattr(programs, "_LONGEST_PAUSE", 0.04)
    monkeypatch.setattr(programs, "_STEADY", 0.0 if steady else HANG)
    begin(ours, "false")
    wait_until(lambda: ours.conditions()["it"].ends >= 5)
    pauses = [record.args[2] for record in caplog.records if record.args[1:2] == ("exit status 1",)]
    assert pauses[:4] == [0.01] * 4 if steady else [0.01, 0.02, 0.04, 0.04]


@pytest.mark.parametrize("ignores", ["trap '' TERM", ":"], ids=["ignores", "heeds"])
def test_all_processes_of_a_program_end_with_it(ours, caplog, monkeypatch, ignores):
    monkeypatch.setattr(programs, "_ENDING", 1.0)
    begin(ours, *script(f"{ignores}; sleep 1000 & echo has $!; echo is $$; while :; do sleep 1; done"))
    wait_until(lambda: numbers(caplog, "is"))
    pids = numbers(caplog, "is") + numbers(caplog, "has")
    assert len(pids) == 2 and all(map(runs, pids))
    ours.close()
    wait_until(lambda: not any(map(runs, pids)))
    reason = "signal 9" if "trap" in ignores else "signal 15"
    assert f"kvtier: program it: stopped: {reason}" in caplog.messages


def test_what_a_program_leaves_behind_is_killed(ours, caplog):
    begin(ours, *script("sleep 1000 & echo left $!; exit 3"))
    wait_until(lambda: ours.conditions()["it"].ends)
    wait_until(lambda: not runs(numbers(caplog, "left")[0]))


def test_the_end_of_a_program_is_noticed_though_another_group_has_its_output(ours, tmp_path):
    left = tmp_path / "left"
    leaves = """setsid sh -c 'echo $$ >>"$0"; exec sleep 1000' "$0" & while ! [ -s "$0" ]; do sleep 0.1; done; exit 3"""
    begin(ours, *script(leaves), left)
    wait_until(lambda: ours.conditions()["it"].last_end == "exit status 3")
    ours.close()
    for pid in map(int, left.read_text().split()):
        assert runs(pid)
        os.kill(pid, signal.SIGKILL)


def test_a_program_is_replaced_when_the_former_has_ended(ours, caplog):
    begin(ours, *script("trap 'sleep 0.5; echo is gone; exit' TERM; echo runs; while :; do sleep 0.1; done"))
    wait_until(lambda: "kvtier: program it: runs" in caplog.messages)
    assert ours.adjust([ProgramConfig("it", script("echo is new; exec sleep 1000"))]) == ["program it: replaced"]
    wait_until(lambda: "kvtier: program it: is new" in caplog.messages)
    told = [message for message in caplog.messages if message.startswith("kvtier: program it: is ")]
    assert told == ["kvtier: program it: is gone", "kvtier: program it: is new"]


def test_output_is_logged_by_lines_of_bounded_length(ours, caplog):
    begin(ours, *script(r"printf 'one\n\ntwo \377\r\n' >&2; head -c 20000 /dev/zero | tr '\0' x; exit 3"))
    wait_until(lambda: ours.conditions()["it"].ends)
    said = [record.args[1] for record in caplog.records if record.args[1:] and isinstance(record.args[1], str)]
    assert said[:2] == ["one", "two �"]
    long = [text for text in said if text.startswith("xx")]
    assert "".join(long) == 20000 * "x" and max(map(len, long)) < 10000


def test_output_forges_no_line(ours, caplog):
    begin(ours, *script(r"printf 'one\rtwo\033[2J\0three\n'; exit 3"))
    wait_until(lambda: ours.conditions()["it"].ends)
    assert r"kvtier: program it: one\rtwo\x1b[2J\x00three" in caplog.messages


@pytest.mark.more
def test_a_program_that_floods_the_log_keeps_no_server_from_answering(served):
    with served.run(floods=["yes", "a word"]):
        wait_until(lambda: "program floods: a word" in served.log())
        for _ in range(3):
            assert kvtier("serve", "--probe", served.socket).returncode == 0
        served.process.send_signal(signal.SIGTERM)
        assert served.process.wait(HANG) == 0


def test_signals_that_python_ignores_have_their_usual_effect(ours, caplog):
    begin(ours, *script("grep SigIgn /proc/$$/status; exec sleep 1000"))
    (line,) = wait_until(lambda: [message for message in caplog.messages if "SigIgn" in message])
    assert not int(line.split()[-1], 16) & (1 << signal.SIGPIPE - 1 | 1 << signal.SIGXFSZ - 1)


# -- their file ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", [("check",), ("serve", "--check", "--config")], ids=lambda words: words[0])
def test_a_check_warns_of_executables_that_are_not_found_and_starts_nothing(served, tmp_path, command):
    marker = tmp_path / "started"
    served.write(lacks=["no-such-program"], makes=["touch", str(marker)])
    checked = kvtier(*command, served.file)
    assert checked.returncode == 0 and "program lacks: 'no-such-program' is not found" in checked.stderr
    assert "program makes" not in checked.stderr and not marker.exists()


def loaded(*written):
    tiers = [{"type": "heap", "capacity": "1MiB"}]
    return load_config({"version": 1, "tiers": tiers, "programs": list(written)}, Registry.of())


@pytest.mark.parametrize("check", [lambda config: config.check_engine(16), lambda config: config.check_host()])
def test_an_engine_and_a_host_refuse_programs(check):
    with pytest.raises(ConfigError, match=r"\$\.programs: (only kvtier serve runs programs|it has no effect)"):
        check(loaded({"name": "it", "command": SLEEPS}))


@pytest.mark.parametrize(
    ("written", "why"),
    [
        ([{"name": "it", "command": SLEEPS}] * 2, "two programs have the same name"),
        ([{"name": "it", "command": []}], r"\$\.programs\[0\]\.command: Length of 'command' must be >= 1"),
        ([{"name": "it", "command": "sleep 1000"}], "expected a list, found 'sleep 1000'"),
        ([{"command": SLEEPS}], "'name' is missing"),
    ],
)
def test_programs_that_no_server_could_run_are_refused(written, why):
    with pytest.raises(ConfigError, match=why):
        loaded(*written)
