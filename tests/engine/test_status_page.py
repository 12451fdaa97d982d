"""`kvtier status`, `top` and `explain`, over the socket of an engine of a hundred lines."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import json
import os
import pty
import random
import socket
import stat
import struct
import subprocess
import sys
import termios
import threading
import tracemalloc

import attrs
import pyte
import pytest
from fake_host import ABOUT, CHUNK
from outsiders import TEXTS, assert_tame
from patience import HANG

from kvtier_core.cli import main
from kvtier_core.config.open import log_warning
from kvtier_core.engine.request_view import KVIdentity
from kvtier_core.telemetry.readings import Readings
from kvtier_core.telemetry.status_page import StatusPage, Tenants
from kvtier_core.types import Event, EventKind, Usage, WriteUse
from kvtier_doctor import top

PROMPT = [random.Random(1).randrange(1000) for _ in range(4 * CHUNK + 3)]


def asked_of(path, *lines):
    """What the engine answers to these bytes."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(path))
        connection.settimeout(HANG)
        for line in lines:
            connection.sendall(line)
        return b"".join(iter(lambda: connection.recv(1 << 16), b""))


def while_it_steps(served, *arguments):
    """The exit status of a command whose question the owner answers in its steps."""
    statuses = []
    command = threading.Thread(target=lambda: statuses.append(main(arguments)))
    command.start()
    while command.is_alive():
        served.step()
    command.join()
    return statuses[0]


def test_the_status_is_what_the_tiers_hold(host, path, capsys):
    served = host()
    served.ask("first", PROMPT), served.ask("second", PROMPT)
    served.settle()
    served.step()
    assert main(["status", "--socket", str(path), "--json"]) == 0
    (told,) = json.loads(capsys.readouterr().out)
    heap, disk = told["tiers"]
    assert (heap["chunks"], disk["chunks"], heap["savings"]["loaded"]) == (4, 4, 4 * CHUNK)
    assert told["requests"] == {"running": 0, "tokens": 2 * len(PROMPT)}
    assert disk["events"]["written"]["chunks"] == 4
    assert main(["status", "--socket", str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "not known yet" in lines[2], "this engine has not said how long it takes to compute a prompt"
    table = [line.split() for line in lines]
    assert [row[0] for row in table[1:]] == ["tier", "heap", "disk"]
    assert table[2][-1] == "works" and "45.7%" in table[2]
    assert "0.0%" in table[3]
    tokens = [{"queried": 70, "hit": 32, "missed": 38}, {"queried": 38, "missed": 38}]
    assert [tier["tokens"] for tier in told["tiers"]] == tokens
    assert heap["events"]["loaded"]["chunks"] == 4


def test_the_status_says_how_long_a_drive_lasts(path, capsys):
    """A hundred bytes a day, for two days, of a drive for 73 000."""
    writes = WriteUse(left=40, per_day=150, endurance=73000, written=200, seconds=2 * 86400)
    usages = [Usage("heap", 4, 512, 1024), Usage("disk", 4, 512, 1024, writes=writes)]
    page = StatusPage(Readings(), lambda: usages, lambda asked: "", dict)
    page.open(str(path), ABOUT, log_warning)
    try:
        assert main(["status", "--socket", str(path)]) == 0
        (said,) = [line for line in capsys.readouterr().out.splitlines() if "written" in line]
        assert said == "disk: 200B written in 2.0 days, 40B may be written now; at this rate 71.3KiB last 2.0 years"
        usages[1] = attrs.evolve(usages[1], writes=attrs.evolve(writes, left=-5, endurance=None))
        page.close()
        page.open(str(path), ABOUT, log_warning)
        assert main(["status", "--socket", str(path)]) == 0
        assert "disk: 200B written in 2.0 days, 0B may be written now\n" in capsys.readouterr().out
    finally:
        page.close()


def test_a_page_needs_no_scheduler_side(path, capsys):
    """As in a server, whose clients have the requests."""
    readings = Readings()
    page = StatusPage(readings, lambda: [Usage("heap", 4, 512, 1024)], lambda asked: "", dict)
    page.open(str(path), ABOUT, log_warning)
    try:
        readings.add([Event(EventKind.QUERIED, "heap", tokens=8), Event(EventKind.HIT, "heap", tokens=6)])
        page.count(b"", tokens=10, queried=8, loaded=6)
        page.note("first", tokens=10, loaded=6, engine_had=2, tiers={"heap": 6}, why="heap 6", waited=0.0)
        page.step()
        assert main(["status", "--socket", str(path)]) == 0
        assert "75.0%" in capsys.readouterr().out
        assert main(["explain", "first", "--socket", str(path)]) == 0
        told = capsys.readouterr().out
        assert told.startswith("first, ")
        assert " s ago: 10 tokens: 2 from the engine's own cache, 6 from kvtier (heap 6), 2 computed" in told
    finally:
        page.close()


def test_the_hit_rate_of_a_tier_is_that_of_what_reaches_it(host, path, capsys):
    """The heap has nothing of what the disk has, and the disk has almost all that it is asked for."""
    first = host()
    first.ask("first", PROMPT)
    first.close()
    second = host()
    second.ask("second", PROMPT), second.ask("third", PROMPT)
    second.step()
    assert main(["status", "--socket", str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "hit rate" in lines[1]
    assert ["45.7%" in lines[2], "84.2%" in lines[3]] == [True, True]


def test_a_load_that_fails_is_no_hit_of_its_tenant(host, path, capsys):
    served = host()
    salted = {"identity": KVIdentity(b"salt")}
    served.ask("first", PROMPT, **salted)
    served.failing = {"second"}
    served.ask("second", PROMPT, **salted)
    served.step()
    assert main(["status", "--socket", str(path), "--json"]) == 0
    (told,) = json.loads(capsys.readouterr().out)
    (tenant,) = told["tenants"]
    assert (tenant["requests"], tenant["tokens"], tenant["loaded"]) == (2, 2 * len(PROMPT), 0)
    assert told["requests"]["tokens"] == 2 * len(PROMPT)


def test_top_looks_again_and_again(host, path, capsys):
    served = host()
    served.ask("first", PROMPT)
    assert main(["top", "--socket", str(path), "--every", "0.01", "--count", "3", "--json"]) == 0
    looks = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [look[0]["tiers"][0]["tier"] for look in looks] == ["heap"] * 3
    assert main(["top", "--socket", str(path), "--count", "1"]) == 0
    assert "in GB/s  out GB/s" in capsys.readouterr().out


def test_top_on_a_terminal_waits_for_an_engine_that_is_gone(host, path):
    first = host()
    script = f"import sys; from kvtier_core.cli import main; sys.exit(main(['top', '--socket', {str(path)!r}, "
    master, slave = pty.openpty()
    command = [sys.executable, "-c", script + "'--every', '0.01']))"]
    with (
        subprocess.Popen(command, stdout=slave, stderr=slave) as looks,
        os.fdopen(master, errors="replace") as terminal,
    ):
        next(line for line in terminal if "tiny" in line)
        first.side.status.close()
        gone = next(line for line in terminal if "no engine answers" in line)
        assert f"{path}: no engine answers: " in gone and "; top waits for one" in gone
        first.close()
        host(about={**ABOUT, "model": "another"})
        next(line for line in terminal if "another" in line)
        looks.kill()


@pytest.mark.parametrize("form", ["--json", "--every=0.01"])
def test_top_into_a_pipe_ends_with_its_engine(host, path, form):
    first = host()
    script = f"import sys; from kvtier_core.cli import main; sys.exit(main(['top', '--socket', {str(path)!r}, "
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    command = [sys.executable, "-c", script + f"'--every=0.01', {form!r}]))"]
    with subprocess.Popen(command, **pipes) as looks:
        assert "tiny" in looks.stdout.readline()
        first.side.status.close()
        told = looks.communicate(timeout=HANG)
    assert looks.returncode == 2
    assert "".join(told).count(f"{path}: no engine answers: ") == 1


def test_top_needs_an_engine_to_begin_with(path, capsys):
    assert main(["top", "--socket", str(path), "--count", "1"]) == 2
    assert "no engine answers" in capsys.readouterr().err


def test_status_has_reads_and_loads(host, path, capsys):
    with_disk = host()
    with_disk.ask("first", PROMPT), with_disk.ask("second", PROMPT)
    with_disk.settle()
    with_disk.step()
    assert main(["status", "--socket", str(path), "--json"]) == 0
    (told,) = json.loads(capsys.readouterr().out)
    assert told["tiers"][0]["events"]["loaded"]["nbytes"] > 0


@pytest.mark.parametrize("kinds", [["read"], ["loaded"], ["read", "loaded"]], ids=" and ".join)
def test_each_departure_from_a_tier_is_counted_once(kinds):
    """Of a frame that workers read from a store, both are told."""
    one, later = (
        {"at": at, "tiers": [{"tier": "gds", "events": {kind: {"nbytes": nbytes} for kind in kinds}}]}
        for at, nbytes in ((1.0, 10**9), (3.0, 5 * 10**9))
    )
    assert top.speeds(later, one) == {"in GB/s": ["0.00"], "out GB/s": ["2.00"]}


def test_tenants_are_told_by_digest_and_are_bounded():
    tenants = Tenants()
    for number in range(1000):
        tenants.count(b"secret %d" % number, 10 + number, 10, 5)
    tenants.count(b"", 1, 1, 0)
    told = tenants.describe()
    assert len(told) <= 66 and "secret" not in str(told)
    assert sum(each["tokens"] for each in told) == sum(range(10, 1010)) + 1
    assert sum(each["requests"] for each in told) == 1001
    assert told[0]["tenant"] == "others" and "-" in [each["tenant"] for each in told]


def test_a_digest_does_not_let_readers_try_salts():
    one, other = Tenants(), Tenants()
    for tenants in (one, one, other):
        tenants.count(b"guessable", 1, 1, 0)
    assert [each["requests"] for each in one.describe()] == [2]
    assert one.describe()[0]["tenant"] != other.describe()[0]["tenant"]


@pytest.mark.parametrize("columns, lines", [(80, 24), (120, 40)])
def test_top_fits_a_terminal(host, path, columns, lines):
    served = host()
    for number in range(12):
        salt = KVIdentity(b"salt %d" % number) if number else KVIdentity()
        served.ask(f"first {number}", PROMPT, identity=salt)
    served.ask("again", PROMPT)
    served.settle()
    served.step()
    script = f"import sys; from kvtier_core.cli import main; sys.exit(main(['top', '--socket', {str(path)!r}, "
    script += "'--count', '3', '--every', '0.1']))"
    screen = screen_of([sys.executable, "-c", script], columns, lines)
    print("\n".join(screen))
    heads = screen[1].split("  ")
    assert screen[0].startswith("pid ") and heads[0] == "tier" and heads[-1].strip() == "state"
    assert [line.split()[0] for line in screen[2:4]] == ["heap", "disk"], "a table is not wrapped"
    assert all(line.endswith("works") for line in screen[2:4])
    assert "out GB/s" in screen[1]
    assert screen[5].split() == ["tenant", "requests", "tokens", "hit", "rate", "share"]
    assert not any("salt" in line for line in screen)


def screen_of(command, columns, lines):
    """What a terminal of this size shows in the end, without what is empty at the right and below."""
    screen = pyte.Screen(columns, lines)
    stream = pyte.ByteStream(screen)
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
    unset = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    with subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave, env={**unset, "TERM": "xterm"}) as running:
        os.close(slave)
        with contextlib.suppress(OSError):  # so a terminal ends on Linux
            while piece := os.read(master, 1 << 16):
                stream.feed(piece)
        os.close(master)
    assert running.returncode == 0, "\n".join(screen.display)
    return [line.rstrip() for line in screen.display]


def test_a_request_is_explained_by_its_hit_line(host, path, capsys):
    served = host()
    served.ask("cmpl-7-0-1234abcd", PROMPT), served.ask("other", PROMPT)
    assert main(["explain", "cmpl-7", "--socket", str(path)]) == 0
    told = capsys.readouterr().out
    assert told.startswith("cmpl-7-0-1234abcd, ")
    assert told.endswith(" s ago: 35 tokens: 0 from kvtier, 35 computed (not stored)\n")
    assert told.count("\n") == 1
    assert main(["explain", "other", "--socket", str(path)]) == 0
    told = capsys.readouterr().out
    assert told.startswith("other, ")
    assert told.endswith(" s ago: 35 tokens: 32 from kvtier (heap 32), 3 computed\n")
    assert main(["explain", "third", "--socket", str(path)]) == 1
    assert "third: no engine knows this request" in capsys.readouterr().err


def test_a_salt_without_a_prompt_is_not_ignored(host, path, capsys, monkeypatch):
    served = host()
    served.ask("first", PROMPT)
    monkeypatch.setenv("SALT", "a salt")
    assert main(["explain", "--cache-salt", "env:SALT", "--socket", str(path)]) != 0
    said = capsys.readouterr()
    assert not said.out and "specify the prompt of that salt: --prompt FILE" in said.err


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_the_id_of_a_request_forges_no_line_and_is_found(host, path, capsys, caplog, text):
    caplog.set_level("DEBUG", "kvtier")
    served = host()
    served.ask(text, PROMPT)
    served.late_loads = 3
    request = served.submit("loads " + text, PROMPT)
    served.step()
    served.side._log_pins()
    served.run(request)
    (told,) = served.side.status.recent(1)
    assert_tame(*caplog.messages)
    assert any("still holds" in line for line in caplog.messages)
    capsys.readouterr()
    for asked in (text[: 1 << 16], text[:8], told["request"], ""):
        main(["explain", *filter(None, [asked]), "--socket", str(path)])
        shown = capsys.readouterr()
        assert_tame(*shown.out.split("\n"))
    assert main(["explain", told["request"], "--socket", str(path)]) == 0


@pytest.mark.parametrize("length", [8, 100, 111, 120, 128, 129, 300])
@pytest.mark.parametrize("form", ["{}", "cmpl-{}-0-1234abcd", "chatcmpl-{}-1234abcd", "chatcmpl-{}"])
def test_a_request_is_found_by_its_id_however_long_it_is(host, path, capsys, form, length):
    served = host()
    asked = ("0123456789" * 30)[:length]
    served.ask(form.format(asked), PROMPT), served.ask("another", PROMPT)
    for known in (asked, form.format(asked), served.side.status.recent(2)[0]["request"]):
        assert main(["explain", known, "--socket", str(path)]) == 0
        assert capsys.readouterr().out.count("\n") == 1
    assert main(["explain", "9" + asked, "--socket", str(path)]) == 1


def test_what_is_remembered_of_a_request_does_not_grow_with_its_id(host):
    served = host()
    served.ask("first", PROMPT)
    gc.collect()
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for number in range(20):
            served.ask(f"{number}{TEXTS['long']}", PROMPT)
        served.plans.clear()
        gc.collect()
        assert tracemalloc.get_traced_memory()[0] - before < len(TEXTS["long"]) / 5
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("which", "logged"), [("all", ["first", "second"]), ("hits", ["second"]), ("misses", ["first"]), ("off", [])]
)
def test_which_requests_are_logged_can_be_chosen(host, path, capsys, caplog, which, logged):
    """All of them can be explained."""
    caplog.set_level("INFO", logger="kvtier")
    served = host(log_requests=which)
    served.ask("first", PROMPT), served.settle(), served.ask("second", PROMPT)
    lines = [line for line in caplog.messages if "tokens: " in line and "from kvtier" in line]
    assert [line.split(": ")[1] for line in lines] == logged
    for name in ("first", "second"):
        assert main(["explain", name, "--socket", str(path)]) == 0
        assert capsys.readouterr().out.startswith(f"{name}, ")


def test_the_last_ten_requests_are_listed(host, path, capsys):
    served = host()
    assert main(["explain", "--socket", str(path)]) == 0 and capsys.readouterr().out == ""
    for number in range(12):
        served.ask(f"{number}", PROMPT)
    assert main(["explain", "--socket", str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    hit = "ago: 35 tokens: 32 from kvtier (heap 32), 3 computed"
    assert len(lines) == 10 and lines[0].startswith("2, ") and all(line.endswith(hit) for line in lines)
    assert main(["explain", "--json", "--socket", str(path)]) == 0
    found = json.loads(capsys.readouterr().out)[str(path)]["found"]
    assert [told["request"] for told in found] == [f"{number}" for number in range(2, 12)]
    hit = {"request": "11", "tokens": 35, "loaded": 32, "engine_had": 0, "tiers": {"heap": 32}, "why": "heap 32"}
    assert found[-1] == {**hit, "waited": 0.0, "at": found[-1]["at"]}


def test_a_request_whose_load_failed_is_explained_by_both_of_its_lines(host, path, capsys):
    served = host()
    served.ask("first", PROMPT)
    served.failing = {"second"}
    served.ask("second", PROMPT)
    assert main(["explain", "second", "--socket", str(path)]) == 0
    hit, miss = capsys.readouterr().out.splitlines()
    assert "32 from kvtier (heap 32)" in hit and miss.endswith("computed (its load failed)")


def test_the_chunks_of_a_prompt_are_found(host, path, tmp_path, capsys):
    served = host(chunks=2)
    served.ask("first", PROMPT)
    served.settle()
    other = [*PROMPT[: 2 * CHUNK], 1, 2, 3, *PROMPT[2 * CHUNK + 3 :]]
    (tmp_path / "prompt.json").write_text(json.dumps(other))
    before = served.manager.usage()
    arguments = ["explain", "--prompt", str(tmp_path / "prompt.json"), "--socket", str(path)]
    assert while_it_steps(served, *arguments) == 0
    told = capsys.readouterr().out.splitlines()
    assert told[:2] == [
        f"35 tokens are 4 chunks of {CHUNK}; the first 2 of them can be loaded",
        f"from token {2 * CHUNK} on: not stored",
    ]
    rows = [line.split("  ") for line in told[3:]]
    assert all("disk" in row[1] for row in rows[:-1])
    assert rows[-1][0] == f"{2 * CHUNK} to {4 * CHUNK - 1}" and rows[-1][-1].strip() == "not stored"
    assert served.manager.usage() == before
    served.assert_at_rest()


def test_why_an_engine_started_cold(host, path, tmp_path, capsys):
    served = host(about={**ABOUT, "cold": "disk holds another namespace: dtype was float32, is bfloat16"})
    (tmp_path / "prompt.json").write_text(json.dumps(PROMPT))
    arguments = ["explain", "--prompt", str(tmp_path / "prompt.json"), "--socket", str(path)]
    assert while_it_steps(served, *arguments) == 0
    assert (
        "this engine started cold because disk holds another namespace: dtype was float32, is bfloat16"
        in capsys.readouterr().out.splitlines()
    )


@pytest.mark.parametrize("text, why", [("[1, true]", "not a list of token ids"), ("{", "cannot read")])
def test_a_prompt_must_be_token_ids(tmp_path, capsys, text, why):
    (tmp_path / "prompt.json").write_text(text)
    assert main(["explain", "--prompt", str(tmp_path / "prompt.json"), "--socket", "nowhere"]) == 2
    assert why in capsys.readouterr().err


@pytest.mark.parametrize(
    "junk",
    [
        b"\n",
        b"garbage\n",
        b"[]\n",
        b"null\n",
        b'{"prompt": ["x"]}\n',
        b'{"request": 3}\n',
        b'{"requests": "x"}\n',
        b'{"requests": 0}\n',
        b"\0" * 4096 + b"\n",
        b"[" * 99_999 + b"\n",
    ],
)
def test_garbage_disturbs_no_connection(host, path, junk):
    served = host()
    answer = asked_of(path, junk)
    assert not answer or "error" in json.loads(answer)
    assert json.loads(asked_of(path, b'{"status": true}\n'))["pid"]
    assert served.ask("first", PROMPT) == 0
    served.assert_at_rest()


def test_a_prompt_that_cannot_be_named_disturbs_no_other(host, path, tmp_path, capsys):
    served = host()
    (tmp_path / "prompt.json").write_text(json.dumps([1 << 40] * CHUNK))
    arguments = ["explain", "--prompt", str(tmp_path / "prompt.json"), "--socket", str(path)]
    assert while_it_steps(served, *arguments) == 2
    assert "this prompt cannot be named" in capsys.readouterr().err
    assert served.ask("first", PROMPT) == 0


def test_a_question_too_long_is_not_read_to_its_end(host, path):
    host()
    with pytest.raises(OSError):
        asked_of(path, *[b" " * (1 << 20)] * 12)
    assert json.loads(asked_of(path, b'{"status": true}\n'))["pid"]


def test_those_who_hang_are_dropped_and_others_answered(host, path, monkeypatch):
    monkeypatch.setattr("kvtier_core.telemetry.status_server._PATIENCE", 0.05)
    served = host()
    with contextlib.ExitStack() as closing:
        for said in [b"", b'{"sta'] * 20:
            hanging = closing.enter_context(socket.socket(socket.AF_UNIX))
            hanging.settimeout(HANG)
            hanging.setblocking(False)
            with contextlib.suppress(BlockingIOError):  # the kernel's queue is full too
                hanging.connect(str(path))
                hanging.send(said)
        assert served.ask("first", PROMPT) == 0, "the engine goes on"
        for _ in range(20):
            with contextlib.suppress(OSError):
                if asked_of(path, b'{"status": true}\n'):
                    break
        else:
            pytest.fail("nobody was answered")


def test_a_client_that_sends_a_byte_now_and_then_is_dropped(host, path, monkeypatch):
    monkeypatch.setattr("kvtier_core.telemetry.status_server._PATIENCE", 0.5)
    host()
    answered = threading.Event()

    def trickle(connection):
        with contextlib.suppress(OSError):
            while not answered.wait(0.01):
                connection.sendall(b" ")

    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(path))
        thread = threading.Thread(target=trickle, args=(connection,))
        thread.start()
        try:
            assert json.loads(asked_of(path, b'{"status": true}\n'))["pid"]
        finally:
            answered.set()
            thread.join()


def test_the_end_waits_for_no_client(host, path, monkeypatch):
    for name in ("_PATIENCE", "_CLOSE_TIMEOUT"):
        monkeypatch.setattr(f"kvtier_core.telemetry.status_server.{name}", 3600.0)
    served = host()
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))
        client.sendall(b"{")
        unread = bytearray(struct.pack("i", 1))
        while any(unread):
            fcntl.ioctl(client, termios.TIOCOUTQ, unread)
        closing = threading.Thread(target=served.side.status.close, daemon=True)
        closing.start()
        closing.join(HANG)
        assert not closing.is_alive()
        assert client.recv(1) == b""


def test_questions_that_no_request_waits_for_are_forgotten(host, path):
    """An idle engine takes none."""
    served = host()
    question = json.dumps({"prompt": PROMPT}).encode() + b"\n"
    for _ in range(40):
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(path))
            connection.sendall(question)
    assert json.loads(asked_of(path, b'{"status": true}\n'))["pid"]
    served.step()
    assert served.ask("first", PROMPT) == 0


def test_the_socket_is_its_owners_alone_and_goes_with_the_engine(host, path):
    served = host()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    (answers,) = (thread for thread in threading.enumerate() if thread.name == "kvtier-status")
    served.side.status.close()
    assert not path.exists()
    assert not answers.is_alive()


def test_a_socket_that_a_killed_engine_left_is_replaced(host, path, capsys):
    script = "import socket, os, signal, sys; s = socket.socket(socket.AF_UNIX); s.bind(sys.argv[1]); s.listen(); "
    subprocess.run([sys.executable, "-c", script + "os.kill(os.getpid(), signal.SIGKILL)", str(path)])
    assert main(["status", "--socket", str(path)]) == 2
    assert "no engine answers: [Errno 111] Connection refused; it may have exited" in capsys.readouterr().err
    host()
    assert main(["status", "--socket", str(path)]) == 0


def test_a_path_that_is_not_an_abandoned_socket_is_left_alone(host, path, caplog):
    path.write_text("something else")
    served = host()
    assert path.read_text() == "something else"
    assert served.ask("first", PROMPT) == 0
    assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == [
        f"kvtier: status: {path}: cannot open a socket, so kvtier status cannot find this engine: [Errno 98] Address "
        "already in use; set another path, status: PATH"
    ]


def test_the_status_page_can_be_turned_off(host, path):
    host(status="off")
    assert not path.exists()
    assert not any(thread.name == "kvtier-status" for thread in threading.enumerate())


def test_engines_are_found_where_they_are_by_default(host, tmp_path, monkeypatch, capsys):
    tmp_path.chmod(0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert main(["status"]) == 2
    assert "no engine socket in" in capsys.readouterr().err
    host(status="auto")
    assert main(["status"]) == 0


def test_a_status_that_fails_ends_alone(host, path, caplog, monkeypatch):
    served = host()

    def usage():
        raise RuntimeError("no usage")

    monkeypatch.setattr(served.side.status, "_usage", usage)
    served.step()
    served.step()
    told = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert told == ["kvtier: status: disabled until the engine restarts: RuntimeError: no usage"]
    assert not path.exists()
    monkeypatch.undo()
    assert served.ask("first", PROMPT) == 0
