"""Observers: what the engine does with them, and the two that the core ships."""

from __future__ import annotations

import contextlib
import fcntl
import http.client
import json
import logging
import os
import re
import signal
import socket
import stat
import struct
import subprocess
import sys
import termios
import threading
import time
import urllib.request
from typing import ClassVar

import attrs
import prometheus_client.parser
import pytest
from manual_pool import ManualPool
from patience import HANG, wait_until
from servers.ports import free_port

from kvtier_core.cli import main
from kvtier_core.config.load import load_config
from kvtier_core.config.open import open_observers
from kvtier_core.config.registry import Registry
from kvtier_core.errors import ConfigError
from kvtier_core.hookspecs import hookimpl
from kvtier_core.interfaces import Observer, ObserverConfig
from kvtier_core.telemetry.observer_feed import _MAX_WAITING, Observers
from kvtier_core.types import Event, EventKind, Nbytes, Usage
from kvtier_observers import plugin
from kvtier_observers.jsonl import JsonLinesConfig
from kvtier_observers.prometheus import PrometheusConfig
from kvtier_testing import ObserverLaws
from kvtier_testing.laws.observers import some_events
from kvtier_testing.samples import make_context, make_keys

STORED = Event(EventKind.STORED, "cpu")


# -- what the engine does with them --------------------------------------------------------------------


class Seen(Observer):
    def __init__(self, fails=False):
        self.fails = fails
        self.seen = []
        self.closed = 0

    def observe(self, events):
        self.seen += events
        if self.fails:
            raise RuntimeError("no")

    def close(self):
        self.closed += 1


class Blocks(Seen):
    def __init__(self):
        super().__init__()
        self.go = threading.Event()

    def observe(self, events):
        self.go.wait(HANG)
        super().observe(events)


def said(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_each_is_told_everything_once_and_in_order_and_closed_once():
    events, observers = list(some_events(1000)), [Seen(), Seen()]
    telling = Observers([("one", observers[0]), ("another", observers[1])])
    for at in range(0, 1000, 10):
        telling.tell(events[at : at + 10])
    telling.tell([])
    telling.close()
    telling.close()
    assert [each.seen for each in observers] == [events, events]
    assert [each.closed for each in observers] == [1, 1]


def test_one_that_raises_is_dropped_and_said_once_and_the_others_go_on(caplog):
    good, bad = Seen(), Seen(fails=True)
    telling = Observers([("observer bad", bad), ("observer good", good)])
    for _ in range(5):
        telling.tell([STORED])
    wait_until(lambda: len(good.seen) == 5)
    wait_until(lambda: telling.tell([]) or bad.closed)
    telling.close()
    assert good.seen == [STORED] * 5
    assert bad.seen == [STORED], "not even what it was to be told already"
    assert (good.closed, bad.closed) == (1, 1)
    assert said(caplog) == ["kvtier: observer bad is disabled until the engine restarts: it raised RuntimeError: no"]


def test_the_engine_does_not_wait_for_one_that_blocks(caplog):
    slow, quick = Blocks(), Seen()
    telling = Observers([("observer slow", slow), ("observer quick", quick)])
    telling.tell([STORED])
    telling.tell([STORED])
    wait_until(lambda: len(quick.seen) == 2)
    assert slow.seen == []
    slow.go.set()
    telling.close()
    assert slow.seen == [STORED] * 2


def test_a_long_call_is_reported_once(caplog):
    pool = ManualPool()
    telling = Observers([("observer slow", Seen())], lambda name, threads: pool)
    telling.tell([STORED])
    pool.oldest = 6.0
    for _ in range(3):
        telling.tell([STORED])
    assert said(caplog) == ["kvtier: observer slow: a call has taken 6 s; events are waiting for it"]
    pool.oldest = 0.0
    telling.tell([])
    pool.oldest = 7.0
    telling.tell([])
    assert len(said(caplog)) == 2, "another call"


def test_memory_for_one_that_blocks_is_bounded(caplog):
    pool = ManualPool()
    telling = Observers([("observer slow", Seen())], lambda name, threads: pool)
    for _ in range(70):
        telling.tell([STORED] * 1000)
    assert len(pool.queue) * 1000 <= _MAX_WAITING + 1000
    wait_until(lambda: not pool.queue)
    assert said(caplog)[-1] == (
        "kvtier: observer slow is disabled until the engine restarts: 66000 events are waiting for it"
    )


def test_a_call_that_never_returns_does_not_keep_the_engine_from_closing(caplog, monkeypatch):
    monkeypatch.setattr("kvtier_core.telemetry.observer_feed._CLOSE_TIMEOUT", 0.1)
    stuck = Blocks()
    telling = Observers([("observer stuck", stuck)])
    telling.tell([STORED])
    telling.close()
    assert stuck.closed == 0, "it is still in use"
    assert said(caplog) == ["kvtier: observer stuck stays open: a call has not returned; it ends with the process"]
    stuck.go.set()


# -- configuration -------------------------------------------------------------------------------------


@attrs.frozen
class SeenConfig(ObserverConfig):
    type: ClassVar[str] = "seen"
    works: bool = True

    def open(self, ctx):
        OPENED.append(Seen())
        return OPENED[-1] if self.works else None


OPENED = []


class Plugin:
    @hookimpl
    def kvtier_observers(self):
        return [SeenConfig]


def configured(*observers):
    source = {"version": 1, "tiers": [{"type": "heap", "capacity": "1GiB"}], "observers": list(observers)}
    return load_config(source, Registry.of(Plugin(), plugin))


def test_observers_are_a_list_as_tiers_are():
    config = configured({"type": "seen"}, "seen", {"type": "seen", "works": False})
    assert config.observers == (SeenConfig(), SeenConfig(), SeenConfig(works=False))
    assert list(config.describe())[1] == "observer seen: Plugin"


def test_all_problems_are_reported_and_none_stays_open():
    OPENED.clear()
    with pytest.raises(ConfigError) as caught:
        open_observers(configured("seen", {"type": "seen", "works": False}), make_context())
    assert [problem.path for problem in caught.value.problems] == ["$.observers[1]"]
    assert "plugin Plugin cannot open observer seen: returned None, expected Observer" in str(caught.value)
    assert OPENED[0].closed == 1


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"type": "jsonl"}, "'path' is missing"),
        ({"type": "jsonl", "path": "/x", "capacity": "1KiB"}, "'capacity' must be at least 1MiB"),
        ({"type": "prometheus", "port": 70000}, "'port' must be <= 65535: 70000"),
        (
            {"type": "prometheus", "socket": "/x", "port": 1},
            "'socket' excludes 'host' and 'port'; write one or the other",
        ),
        ({"type": "promteheus"}, "no observer 'promteheus' is installed (have: jsonl, opentelemetry, prometheus, "),
    ],
)
def test_errors_are_reported_with_their_line(wrong, why):
    with pytest.raises(ConfigError, match=re.escape(why)):
        configured(wrong)


def test_check_and_plugins_show_them(tmp_path, capsys):
    file = tmp_path / "kvtier.yaml"
    file.write_text(
        "version: 1\ntiers:\n  - {type: heap, capacity: 1GiB}\nobservers:\n  - {type: jsonl, path: /tmp/events}\n"
    )
    assert main(["check", "--all", str(file)]) == 0
    lines = [line.split(maxsplit=2) for line in capsys.readouterr().out.splitlines()]
    assert ["$.observers[0].type", "jsonl", "default"] not in lines
    assert ["$.observers[0].path", "/tmp/events", f"{file}:5"] in lines
    assert ["$.observers[0].capacity", "256MiB", "default"] in lines
    assert main(["plugins"]) == 0
    listed = [line.split()[:2] for line in capsys.readouterr().out.splitlines()]
    assert ["observer", "jsonl"] in listed and ["observer", "prometheus"] in listed


# -- jsonl ---------------------------------------------------------------------------------------------


def lines_of(folder):
    return [json.loads(line) for file in sorted(folder.glob("*.jsonl")) for line in file.read_text().splitlines()]


class TestJsonLines(ObserverLaws):
    def config(self, folder):
        return JsonLinesConfig(folder / "events", keys=True)

    def told(self, folder, observer):
        return [(line["event"], line["tier"], line.get("chunks", 0)) for line in lines_of(folder / "events")]


def test_a_line_says_what_is_known(tmp_path):
    observer = JsonLinesConfig(tmp_path).open(make_context())
    keys = tuple(make_keys(2))
    usage = Usage("disk", chunks=2, nbytes=3, capacity=4)
    observer.observe(
        [
            Event(EventKind.READ, "disk", keys, 4096, seconds=0.25),
            Event(EventKind.USAGE, "disk", usage=usage),
            Event(EventKind.HIT, "disk", tokens=8, request="r" * 300),
        ]
    )
    observer.close()
    read, used, hit = lines_of(tmp_path)
    assert (hit["tokens"], hit["request"]) == (8, "r" * 256)
    assert abs(read.pop("time") - time.time()) < 3600
    assert read == {"event": "read", "tier": "disk", "chunks": 2, "bytes": 4096, "seconds": 0.25}
    assert used["usage"] == {
        "chunks": 2, "nbytes": 3, "capacity": 4, "pins": 0, "inflight": 0, "can_read": True, "can_write": True,
        "writes": None
    }  # fmt: skip
    with_keys = JsonLinesConfig(tmp_path / "keys", keys=True).open(make_context())
    with_keys.observe([Event(EventKind.READ, "disk", keys)])
    with_keys.close()
    assert lines_of(tmp_path / "keys")[0]["keys"] == [key.hex() for key in keys]


def test_a_file_of_events_is_its_owners_alone(tmp_path):
    observer = JsonLinesConfig(tmp_path / "events").open(make_context())
    observer.close()
    (file,) = (tmp_path / "events").iterdir()
    modes = [stat.S_IMODE(each.stat().st_mode) for each in (tmp_path / "events", file)]
    assert modes == [0o700, 0o600]


@pytest.mark.parametrize("replicas", [1, 2])
def test_all_files_together_keep_within_the_capacity(tmp_path, replicas):
    capacity = Nbytes(1 << 20)
    config = JsonLinesConfig(tmp_path, capacity)
    other = tmp_path / "notes.jsonl"
    other.write_bytes(bytes(1 << 20))
    contexts = [attrs.evolve(make_context(), replica=each, replicas=replicas) for each in range(replicas)]
    for _ in range(3):  # starts of the engine
        opened = [config.open(ctx) for ctx in contexts]
        for _ in range(60):
            for observer in opened:
                observer.observe(some_events(100))
            sizes = [file.stat().st_size for file in tmp_path.glob("*.kvtier-events.jsonl")]
            assert sum(sizes) <= capacity
        for observer in opened:
            observer.close()
    assert sum(sizes) > capacity // 2, "the test wrote enough"
    assert other.stat().st_size == 1 << 20
    other.unlink()
    assert lines_of(tmp_path)


def test_files_that_are_written_are_not_removed(tmp_path):
    config = JsonLinesConfig(tmp_path, Nbytes(1 << 20))
    first = config.open(make_context())
    (its,) = tmp_path.iterdir()
    second = config.open(make_context())
    for _ in range(100):
        second.observe(some_events(100))
    assert its.exists()
    first.close()
    for _ in range(100):
        second.observe(some_events(100))
    assert not its.exists()
    second.close()


def test_too_many_engines_are_told_so(tmp_path):
    config = JsonLinesConfig(tmp_path, Nbytes(1 << 20))
    opened = [config.open(make_context()) for _ in range(4)]
    with pytest.raises(Exception, match="4 engines write to .*, and their files fill its 1MiB"):
        config.open(make_context())
    for observer in opened:
        observer.close()


def test_a_kill_leaves_whole_lines(tmp_path):
    """The next engine cuts off what is left of a line."""
    code = (
        "import sys; from pathlib import Path; from kvtier_observers.jsonl import JsonLinesConfig\n"
        "from kvtier_testing.laws.observers import some_events\n"
        "from kvtier_testing.samples import make_context\n"
        "observer = JsonLinesConfig(Path(sys.argv[1]), keys=True).open(make_context())\n"
        "print(flush=True)\n"
        "while True: observer.observe(some_events(500))"
    )
    for _ in range(5):
        with subprocess.Popen([sys.executable, "-c", code, tmp_path], stdout=subprocess.PIPE) as child:
            child.stdout.readline()  # its file is there
            wait_until(lambda: max(tmp_path.iterdir()).stat().st_size > 100_000)
            os.kill(child.pid, signal.SIGKILL)
    assert len(list(tmp_path.iterdir())) == 5
    torn = max(tmp_path.iterdir())
    whole = torn.read_bytes().rindex(b"\n") + 1  # the kill itself may have cut a line
    with torn.open("ab") as file:
        file.write(b'{"time": 17, "eve' + bytes(200_000))
    JsonLinesConfig(tmp_path).open(make_context()).close()
    assert torn.stat().st_size == whole
    assert all(file.read_bytes()[-1:] in (b"", b"\n") for file in tmp_path.iterdir())
    assert len(lines_of(tmp_path)) > 1000


def test_a_full_disk_ends_it_and_nothing_else(tmp_path, caplog):
    observer = JsonLinesConfig(tmp_path).open(make_context())
    telling = Observers([("observer jsonl", observer)])
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, observer._file)
    os.close(full)
    telling.tell([STORED])
    wait_until(lambda: telling.tell([]) or said(caplog))
    assert "No space left on device" in said(caplog)[0]
    telling.close()


# -- prometheus ----------------------------------------------------------------------------------------


def samples_of(text):
    return {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in prometheus_client.parser.text_string_to_metric_families(text)
        for sample in family.samples
    }


def scraped(address):
    return samples_of(urllib.request.urlopen(address, timeout=HANG).read().decode())


class TestPrometheus(ObserverLaws):
    ordered = False

    def config(self, folder):
        return PrometheusConfig()

    def told(self, folder, observer):
        samples = scraped(observer.address).items()
        labels = [(dict(labels), value) for (name, *labels), value in samples if name == "kvtier_chunks_total"]
        return [(each["event"], each["tier"], int(value)) for each, value in labels]


class TestPrometheusAtASocket(ObserverLaws):
    def config(self, folder):
        folder.mkdir(exist_ok=True)
        return PrometheusConfig(socket=folder / "metrics")


class AtSocket(http.client.HTTPConnection):
    def __init__(self, path):
        super().__init__("localhost")
        self._path = path

    def connect(self):
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.connect(self._path)


def test_the_endpoint_binds_to_loopback_unless_told_otherwise():
    observer = PrometheusConfig().open(make_context())
    assert observer.address.startswith("http://127.0.0.1:")
    observer.close()


def test_a_socket_is_its_owners_alone_and_replaces_what_a_kill_has_left(tmp_path):
    path = tmp_path / "metrics"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    observer = PrometheusConfig(socket=path).open(make_context())
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    observer.observe([Event(EventKind.HIT, "disk", tokens=5)])
    client = AtSocket(str(path))
    client.request("GET", "/metrics")
    told = samples_of(client.getresponse().read().decode())
    assert told["kvtier_hit_tokens_total", ("engine", "0"), ("tier", "disk")] == 5
    with pytest.raises(Exception, match="another process serves"):
        PrometheusConfig(socket=path).open(make_context())
    observer.close()
    assert not path.exists()


def test_no_file_is_taken_for_a_socket(tmp_path):
    path = tmp_path / "notes"
    path.write_text("mine")
    with pytest.raises(Exception, match="cannot serve metrics"):
        PrometheusConfig(socket=path).open(make_context())
    assert path.read_text() == "mine"


def test_replicas_have_ports_of_their_own():
    port = free_port(side_by_side=2)
    contexts = [attrs.evolve(make_context(), replica=each, replicas=2) for each in (0, 1)]
    opened = [PrometheusConfig(port=port).open(ctx) for ctx in contexts]
    assert [observer.address for observer in opened] == [f"http://127.0.0.1:{port + each}/metrics" for each in (0, 1)]
    for observer in opened:
        observer.close()


def test_a_silent_client_delays_others_only_briefly(monkeypatch):
    monkeypatch.setattr("kvtier_observers.endpoint._PATIENCE", 0.1)
    observer = PrometheusConfig().open(make_context())
    host, port = re.search(r"//(.*):(\d+)/", observer.address).groups()
    with socket.create_connection((host, int(port))):
        assert scraped(observer.address) == {}
    observer.close()


def test_a_client_that_trickles_bytes_delays_others_only_briefly(monkeypatch):
    monkeypatch.setattr("kvtier_observers.endpoint._PATIENCE", 0.5)
    observer = PrometheusConfig().open(make_context())
    host, port = re.search(r"//(.*):(\d+)/", observer.address).groups()
    served = threading.Event()

    def trickle(connection):
        with contextlib.suppress(OSError):
            while not served.wait(0.01):
                connection.sendall(b"G")

    with socket.create_connection((host, int(port))) as connection:
        thread = threading.Thread(target=trickle, args=(connection,))
        thread.start()
        try:
            assert scraped(observer.address) == {}
        finally:
            served.set()
            thread.join()
    observer.close()


def test_the_end_of_the_endpoint_waits_for_no_client(tmp_path, monkeypatch):
    monkeypatch.setattr("kvtier_observers.endpoint._PATIENCE", 3600.0)
    observer = PrometheusConfig(socket=tmp_path / "metrics").open(make_context())
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(tmp_path / "metrics"))
        client.sendall(b"GET /metrics HTTP/1.0\r\n")
        unread = bytearray(struct.pack("i", 1))
        while any(unread):
            fcntl.ioctl(client, termios.TIOCOUTQ, unread)
        closing = threading.Thread(target=observer.close, daemon=True)
        closing.start()
        closing.join(HANG)
        assert not closing.is_alive()
        assert client.recv(1) == b""


@pytest.mark.parametrize("at", ["a port", "a socket"])
def test_head_has_the_headers_of_get_and_nothing_else(tmp_path, at):
    config = PrometheusConfig() if at == "a port" else PrometheusConfig(socket=tmp_path / "metrics")
    observer = config.open(make_context())
    observer.observe([Event(EventKind.HIT, "disk", tokens=5)])
    answers = []
    for method in ("GET", "HEAD"):
        port = re.search(r":(\d+)/", observer.address)
        client = http.client.HTTPConnection("127.0.0.1", int(port[1])) if port else AtSocket(observer.address)
        client.request(method, "/metrics")
        client.sock.settimeout(HANG)
        raw = b"".join(iter(lambda sock=client.sock: sock.recv(1 << 16), b""))
        answers.append(raw.partition(b"\r\n\r\n"))
        client.close()
    (got, _, text), (headers, _, nothing) = answers
    assert (re.sub(rb"Date: .*", b"", headers), nothing) == (re.sub(rb"Date: .*", b"", got), b"")
    assert b"kvtier_hit_tokens_total" in text
    observer.close()
