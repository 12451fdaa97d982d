"""`kvtier check --open` says of a file what the start of an engine says, and leaves everything as it was."""

from __future__ import annotations

import contextlib
import os
import socket
import sys

import pytest
from servers.ports import free_port
from test_ranks import REPORT

from kvtier_core.cli import main
from kvtier_core.cli.output import FINE, PROBLEMS
from kvtier_core.config.load import load_config
from kvtier_core.config.registry import Registry
from kvtier_core.engine.start.startup import Engine, Identity
from kvtier_core.errors import ConfigError
from kvtier_core.types import Namespace

CPU = "{type: cpu, capacity: 64MiB, huge_pages: off}"
PORT, SOCKET, HERE = "{type: prometheus, port: PORT}", "{type: prometheus, socket: HERE/metrics}", "HERE"
JSONL, RECORD = "{type: jsonl, path: HERE/events, capacity: 1MiB}", "record: {path: HERE/recorded}"


def file_of(*tiers, observers=(), more=()):
    lines = ["version: 1", *more, "tiers:", *(f"  - {each}" for each in (CPU, *tiers))]
    return "\n".join([*lines, *(["observers:"] if observers else []), *(f"  - {each}" for each in observers), ""])


def disk(path, **settings):
    given = "".join(f", {name}: {value}" for name, value in settings.items())
    return f"{{type: disk, capacity: 64MiB, path: {HERE}/{path}{given}}}"


def gds(path, capacity="64MiB"):
    return f"{{type: gds, capacity: {capacity}, paths: [{HERE}/{path}], mode: bounce}}"


STARTS = {
    "memory alone": file_of(),
    "a disk": file_of(disk("new/store")),
    "a disk with files of a killed engine": file_of(disk("swept")),
    "a folder that engines share": file_of(disk("shared", shared="true")),
    "a slab": file_of(gds("new/slab")),
    "a slab that becomes smaller": file_of(gds("slab", "8MiB")),
    "peers that nobody is": file_of("{type: peers, listen: '127.0.0.1:PORT', peers: ['127.0.0.1:1']}"),
    "redis that nobody serves": file_of("{type: redis, url: 'redis://127.0.0.1:1'}"),
    "every observer": file_of(observers=[PORT, SOCKET, JSONL, "{type: opentelemetry}"]),
    "events in a full folder": file_of(observers=["{type: jsonl, path: HERE/full, capacity: 1MiB}"]),
    "a recording": file_of(more=[RECORD]),
    "a status socket that cannot be had": file_of(more=["status: HERE/file"]),
    "no folder for sockets": file_of(more=["status: HERE/nowhere/status"]),
    "a server that nobody runs": "version: 1\nserver: unix:HERE/kvtier.sock\n",
}
REFUSED = {
    "two metrics at one port": file_of(observers=[PORT, PORT]),
    "two metrics at one socket": file_of(observers=[SOCKET, SOCKET]),
    "metrics at a port in use": file_of(observers=["{type: prometheus, port: TAKEN}"]),
    "metrics at a file": file_of(observers=["{type: prometheus, socket: HERE/file}"]),
    "events in a file": file_of(observers=["{type: jsonl, path: HERE/file}"]),
    "events below a file": file_of(observers=["{type: jsonl, path: HERE/file/events}"]),
    "a recording in a file": file_of(more=["record: {path: HERE/file}"]),
    "a recording below a file": file_of(more=["record: {path: HERE/file/recorded}"], observers=[PORT]),
    "two disks in one folder": file_of(disk("store"), disk("store")),
    "a disk and a slab in one folder": file_of(disk("store"), gds("store")),
    "a disk in a file": file_of(disk("file")),
    "a disk in a folder of everybody": file_of(disk("everybodys")),
    "a disk in a folder that engines share": file_of(disk("shared")),
    "a slab without room": file_of(gds("slab", "1000TiB")),
    "memory that is not there": file_of().replace("64MiB", "1000TiB"),
    "memory without room for a chunk": file_of().replace("64MiB", "1KiB"),
    "a disk without room for a chunk": file_of(disk("store").replace("64MiB", "1KiB")),
    "kept memory of an engine": file_of().replace("off}", "off, keep: HERE/kept}"),
    "peers at a port in use": file_of("{type: peers, listen: '127.0.0.1:TAKEN'}"),
    "an unknown tier": file_of("{type: unknown}"),
    "an unknown observer": file_of(observers=["{type: unknown}"]),
    "a key that is not set": file_of(disk("store", seal_key="{env: NOT_SET}")),
    "a lossy codec that nobody measured": file_of(disk("store", serializer="fp8")),
    "certificates that are not there": file_of("{type: redis, url: 'rediss://127.0.0.1:1', ca: HERE/nowhere}"),
    "an extra that is missing": file_of(observers=["{type: prometheus, port: 0}"]),
    "a collector over an unknown protocol": file_of(observers=["{type: opentelemetry}"]),
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """With files, folders of several kinds, and a port that is taken: the last entry of ``TAKEN``."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    tmp_path.chmod(0o700)
    (tmp_path / "file").write_text("a file")
    for name in "everybodys", "shared", "swept", "full", "slab":
        (tmp_path / name).mkdir(mode=0o700)
    (tmp_path / "everybodys").chmod(0o777)
    for name in ".kvtier-shared", "events":
        os.close(os.open(tmp_path / "shared" / name, os.O_CREAT, 0o600))
    (tmp_path / "swept" / ".kvtier-probe-of-a-killed-engine").write_text("")
    for number in range(8):
        (tmp_path / "full" / f"{number:020}-a.kvtier-events.jsonl").write_text("half a line" * 20_000)
    with contextlib.closing(opened_engine("slab", file_of(gds("slab")), tmp_path)):
        pass
    return tmp_path


def opened_engine(name, text, folder):
    (folder / f"{name}.yaml").write_text(text.replace("HERE", str(folder)))
    config = load_config(folder / f"{name}.yaml", Registry.discover())
    identity = Identity(Namespace.of({"model": "m"}), Namespace.of({}))
    return Engine(lambda *_: identity, name="a", model="m", version="a host 1.2").open(config, [REPORT])


def starts(text, folder):
    try:
        opened_engine("engine", text, folder).close()
    except ConfigError as error:
        print(error)
        return False
    return True


def seen(folder):
    """Each file with its length, blocks and content, and each folder."""
    found = {}
    for path in sorted(folder.rglob("*")):
        status = path.lstat()
        content = path.read_bytes() if path.is_file() else b""
        found[path.relative_to(folder)] = (status.st_mode, status.st_ino, status.st_blocks, content)
    return {name: what for name, what in found.items() if not str(name).endswith(".yaml")}


@pytest.mark.parametrize(
    ("text", "good"),
    [
        *(pytest.param(text, True, id=name) for name, text in STARTS.items()),
        *(pytest.param(text, False, id=name) for name, text in REFUSED.items()),
    ],
)
def test_check_agrees_with_the_start_of_an_engine_and_changes_nothing(folder, text, good, monkeypatch, request, capsys):
    if "extra" in request.node.callspec.id:
        monkeypatch.delitem(sys.modules, "kvtier_observers.endpoint", raising=False)
        monkeypatch.setitem(sys.modules, "prometheus_client.core", None)
    if "unknown protocol" in request.node.callspec.id:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "pigeons")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        text = text.replace("TAKEN", f"{taken.getsockname()[1]}").replace("PORT", f"{free_port()}")
        (folder / "kvtier.yaml").write_text(text.replace("HERE", str(folder)))
        before = seen(folder)
        checked = main(["check", str(folder / "kvtier.yaml"), "--open"])
        after = seen(folder)
        print(capsys.readouterr())
        assert checked == (FINE if good else PROBLEMS)
        assert after == before
        assert starts(text, folder) is good
