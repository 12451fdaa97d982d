"""`kvtier check --open` says of a file what the start of an engine says, and leaves everything as it was."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import socket
import sys
import tempfile
from importlib.metadata import entry_points
from pathlib import Path

import pytest
from disks import ext4, tmpfs
from opened import kubelet_opens
from servers.ports import free_port
from sizes import LONG

from kvtier_core.cli import main
from kvtier_core.cli.output import FINE, PROBLEMS, USAGE, Output
from kvtier_core.config.load import load_config
from kvtier_core.config.registry import Registry
from kvtier_core.engine.messages import Refusal, WorkerReport
from kvtier_core.engine.start.startup import Engine, Identity
from kvtier_core.errors import ConfigError
from kvtier_core.types import Namespace
from kvtier_doctor import tiers

CPU = "{type: cpu, capacity: 8MiB, huge_pages: off}"
PORT, SOCKET, HERE = "{type: prometheus, port: PORT}", "{type: prometheus, socket: HERE/metrics}", "HERE"
JSONL, RECORDING = "{type: jsonl, path: HERE/events, capacity: 1MiB}", "{type: recording, path: HERE/recorded}"
STRANGER = 12345


def file_of(*tiers, observers=(), more=()):
    lines = ["version: 1", *more, "tiers:", *(f"  - {each}" for each in (CPU, *tiers))]
    return "\n".join([*lines, *(["observers:"] if observers else []), *(f"  - {each}" for each in observers), ""])


def disk(path, **settings):
    given = "".join(f", {name}: {value}" for name, value in settings.items())
    return f"{{type: disk, capacity: 64MiB, path: {HERE}/{path}{given}}}"


def gds(path, capacity="64MiB", **settings):
    given = "".join(f", {name}: {value}" for name, value in settings.items())
    return f"{{type: gds, capacity: {capacity}, paths: [{HERE}/{path}], mode: bounce{given}}}"


UNMEASURED = {"accept_quality": "unmeasured"}
STARTS = {
    "memory alone": file_of(),
    "a disk": file_of(disk("new/store")),
    "a disk with files of a killed engine": file_of(disk("swept")),
    "a disk with more than its capacity": file_of(disk("filled")),
    "a folder that engines share": file_of(disk("shared", shared="true")),
    "a new folder that engines share": file_of(disk("new/shared", shared="true")),
    "a slab": file_of(gds("new/slab")),
    "a slab that becomes smaller": file_of(gds("slab", "8MiB")),
    "a slab of another user": file_of(gds("foreign")),
    "a slab that kubelet has opened": file_of(gds("opened/slab")),
    "a disk that kubelet has opened": file_of(disk("opened/disk")),
    "a disk beside a slab, both new": file_of(disk("new/disk"), gds("new/slab")),
    "peers that nobody is": file_of("{type: peers, listen: '127.0.0.1:PORT', peers: ['127.0.0.1:1']}"),
    "redis that nobody serves": file_of("{type: redis, url: 'redis://127.0.0.1:1'}"),
    "every observer": file_of(observers=[PORT, SOCKET, JSONL, "{type: opentelemetry}"]),
    "events in a full folder": file_of(observers=["{type: jsonl, path: HERE/full, capacity: 1MiB}"]),
    "events and a recording below a new disk": file_of(
        disk("new/store"),
        observers=["{type: jsonl, path: HERE/new/store/a/events}", "{type: recording, path: HERE/new/store/recorded}"],
    ),
    "sockets below a new disk": file_of(
        disk("new/store"),
        observers=["{type: prometheus, socket: HERE/new/store/metrics}"],
        more=["status: HERE/new/status"],
    ),
    "a recording": file_of(observers=[RECORDING]),
    "a status socket that cannot be had": file_of(more=["status: HERE/file"]),
    "a status socket in use": file_of(more=["status: HERE/live"]),
    "a status socket of a killed engine": file_of(more=["status: HERE/dead"]),
    "a status socket whose path is too long": file_of(more=[f"status: HERE/{'s' * 100}"]),
    "a status socket without a path": file_of(more=[r'status: "HERE/a\0b"']),
    "a status socket of nobody": file_of(more=["status: ~nobody-here/status"]),
    "a status socket where metrics are": file_of(observers=[SOCKET], more=["status: HERE/metrics"]),
    "no folder for sockets": file_of(more=["status: HERE/nowhere/status"]),
    "a server that nobody runs": "version: 1\nserver: unix:HERE/kvtier.sock\n",
    "an optional disk in a file": file_of(disk("file", required="false")),
    "an optional slab without room": file_of(gds("new/slab", "1000TiB", required="false")),
    "an optional disk in the folder of another": file_of(disk("store"), disk("store", required="false")),
    "chunks of three blocks": file_of(more=["chunk_tokens: 48"]),
    **{
        f"{codec}, which nobody measured and somebody accepts": file_of(disk("store", serializer=codec, **UNMEASURED))
        for codec in ("fp8", "int8", "kivi", "cachegen")
    },
}
REFUSED = {
    "two metrics at one port": file_of(observers=[PORT, PORT]),
    "two metrics at one socket": file_of(observers=[SOCKET, SOCKET]),
    "metrics at a port in use": file_of(observers=["{type: prometheus, port: TAKEN}"]),
    "metrics at a file": file_of(observers=["{type: prometheus, socket: HERE/file}"]),
    "metrics at a socket in use": file_of(observers=["{type: prometheus, socket: HERE/live}"]),
    "metrics below a new folder": file_of(observers=["{type: prometheus, socket: HERE/new/metrics}"]),
    "events in a file": file_of(observers=["{type: jsonl, path: HERE/file}"]),
    "events below a file": file_of(observers=["{type: jsonl, path: HERE/file/events}"]),
    "events at a link to nothing": file_of(observers=["{type: jsonl, path: HERE/nothing}"]),
    "events below a link to nothing": file_of(observers=["{type: jsonl, path: HERE/nothing/events}"]),
    "a recording in a file": file_of(observers=["{type: recording, path: HERE/file}"]),
    "a recording below a file": file_of(observers=["{type: recording, path: HERE/file/recorded}", PORT]),
    "two disks in one folder": file_of(disk("store"), disk("store")),
    "two disks in one new folder": file_of(disk("new/store"), disk("new/../new/store")),
    "two folders that engines share in one": file_of(disk("shared", shared="true"), disk("shared", shared="true")),
    "a disk and a slab in one folder": file_of(disk("store"), gds("store")),
    "a slab twice in one folder": file_of(gds("new/slab").replace("]", f", {HERE}/new/../new/slab]", 1)),
    "a disk in a file": file_of(disk("file")),
    "a disk at a link": file_of(disk("link")),
    "a disk in a folder of everybody": file_of(disk("everybodys")),
    "a disk in a folder that engines share": file_of(disk("shared")),
    "a disk in a folder that an engine has": file_of(disk("locked")),
    "a disk whose lock is a folder": file_of(disk("lockless")),
    "a disk with a namespace that everybody writes to": file_of(disk("namespaces")),
    "a disk with a shard that everybody writes to": file_of(disk("shards")),
    "a slab that everybody reads": file_of(gds("read")),
    "a slab with another link": file_of(gds("linked")),
    "a slab whose table is a folder": file_of(gds("tabled")),
    "a slab without room": file_of(gds("slab", "1000TiB")),
    "memory that is not there": file_of().replace("8MiB", "1000TiB"),
    "memory without room for a chunk": file_of().replace("8MiB", "1KiB"),
    "a disk without room for a chunk": file_of(disk("store").replace("64MiB", "1KiB")),
    "kept memory of an engine": file_of().replace("off}", "off, keep: HERE/kept}"),
    "peers at a port in use": file_of("{type: peers, listen: '127.0.0.1:TAKEN'}"),
    "an unknown tier": file_of("{type: unknown}"),
    "an unknown observer": file_of(observers=["{type: unknown}"]),
    "a key that is not set": file_of(disk("store", seal_key="env:NOT_SET")),
    "a salt that is not set": file_of(more=["requests: {salts: [{cache_salt: 'env:NOT_SET', store: no}]}"]),
    "a lossy codec that nobody measured": file_of(disk("store", serializer="fp8")),
    "a lossy codec that does not suit": file_of(disk("store", serializer="{type: int8, group: 7}", **UNMEASURED)),
    "chunks of a block and a half": file_of(more=["chunk_tokens: 24"]),
    "a tier for one model of a server": file_of(disk("store", model="named")),
    "programs of a server": file_of(more=["programs: [{name: a, command: [a]}]"]),
    "certificates that are not there": file_of("{type: redis, url: 'rediss://127.0.0.1:1', ca: HERE/nowhere}"),
    "an extra that is missing": file_of(observers=["{type: prometheus, port: 0}"]),
    "a collector over an unknown protocol": file_of(observers=["{type: opentelemetry}"]),
    "several problems": file_of(
        gds("read"), disk("shards"), observers=[SOCKET, SOCKET, "{type: recording, path: HERE/file}"]
    ),
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """With files, folders of several kinds, and a port that is taken: the last entry of ``TAKEN``."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    tmp_path.chmod(0o700)
    (tmp_path / "file").write_text("a file")
    (tmp_path / "nothing").symlink_to("nowhere")
    for name in "everybodys", "shared", "swept", "full", "lockless/.kvtier-lock", "namespaces", "shards":
        (tmp_path / name).mkdir(mode=0o700, parents=True)
    (tmp_path / "lockless").chmod(0o700)
    (tmp_path / "everybodys").chmod(0o777)
    (tmp_path / "link").symlink_to("swept")
    for name in ".kvtier-shared", "events":
        os.close(os.open(tmp_path / "shared" / name, os.O_CREAT, 0o600))
    (tmp_path / "swept" / ".kvtier-probe-of-a-killed-engine").write_text("")
    for number in range(8):
        (tmp_path / "full" / f"{number:020}-a.kvtier-events.jsonl").write_text("half a line" * 20_000)
    slabs = "slab", "read", "linked", "tabled", "foreign", "opened/slab"
    of_disks = "filled", "opened/disk", "namespaces", "shards"
    text = file_of(*(gds(name, "4MiB") for name in slabs), *(disk(name) for name in of_disks))
    with contextlib.closing(opened_engine("before", text, tmp_path)):
        pass
    (tmp_path / "read/kvtier.slab").chmod(0o644)
    (tmp_path / "linked/another").hardlink_to(tmp_path / "linked/kvtier.slab")
    (tmp_path / "tabled/kvtier.table").unlink()
    (tmp_path / "tabled/kvtier.table").mkdir()
    if os.geteuid() == 0:
        os.chown(tmp_path / "foreign/kvtier.slab", STRANGER, STRANGER)
    kubelet_opens(tmp_path / "opened")
    home_of(tmp_path / "namespaces").chmod(0o4777)
    make_shard(tmp_path / "shards", 0o777)
    fill(tmp_path / "filled")
    return tmp_path


def home_of(store):
    """The folder of the namespace of the engine that has used a disk."""
    return next(path for path in store.iterdir() if path.is_dir() and len(path.name) == 16)


def make_shard(store, mode):
    shard = home_of(store) / "ab"
    shard.mkdir()
    shard.chmod(mode)
    return shard


def fill(store):
    """Frames of 128MiB, by their names and lengths."""
    shard = make_shard(store, 0o700)
    for number in range(32):
        with open(os.open(shard / f"ab{number:062x}.kv", os.O_CREAT | os.O_WRONLY, 0o600), "wb") as file:
            file.truncate(4 << 20)


def opened_engine(name, text, folder):
    """What the connector of an engine does, with the KV that a check assumes. Raises ConfigError."""
    (folder / f"{name}.yaml").write_text(text.replace("HERE", str(folder)))
    config = load_config(folder / f"{name}.yaml", Registry.discover())
    group = tiers.kv_of(None, Output())
    config.check_engine(group.block_tokens)
    identity = Identity(Namespace.of({"model": "m"}), Namespace.of({}))
    opened = Engine(lambda *_: identity, name="a", model="m", version="a host 1.2").open(
        config, [WorkerReport("cpu", (group,), ())]
    )
    assert not isinstance(opened, Refusal), opened
    return opened


def start(text, folder, caplog):
    """The settings that keep an engine from starting, and what it starts without."""
    caplog.clear()
    try:
        opened_engine("kvtier", text, folder).close()
    except ConfigError as error:
        return sorted(each.path for each in error.problems), []
    return [], sorted(map(named, warnings(caplog)))


def warnings(caplog):
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


def named(line):
    """Who says it, and of which setting: the system's words may differ."""
    return re.match(r"(kvtier: )?([^:]*)(.*?(\$[^:]*))?", line).group(2, 4)


def check(text, folder, capsys, caplog):
    """The same of a check, which changes nothing."""
    (folder / "kvtier.yaml").write_text(text.replace("HERE", str(folder)))
    capsys.readouterr()
    caplog.clear()
    before = seen(folder)
    status = main(["check", str(folder / "kvtier.yaml"), "--open", "--json"])
    after = seen(folder)
    assert after == before
    told = json.loads(capsys.readouterr().out)
    assert status == (PROBLEMS if "problems" in told else FINE)
    without = [*told.get("quality", ()), *told.get("without", ()), *warnings(caplog)] if status == FINE else []
    return sorted(each["path"] for each in told.get("problems", ())), sorted(map(named, without))


def seen(folder):
    """Each file and folder: owner, mode, times, length and blocks."""
    found = {}
    for path in (folder, *sorted(folder.rglob("*"))):
        status = path.lstat()
        found[path] = (
            (status.st_ino, status.st_uid, status.st_gid, status.st_mode, status.st_nlink),
            (status.st_size, status.st_blocks, status.st_mtime_ns, status.st_ctime_ns),
        )
    return found


@pytest.mark.parametrize(
    ("text", "good"),
    [
        *(pytest.param(text, True, id=name) for name, text in STARTS.items()),
        *(pytest.param(text, False, id=name) for name, text in REFUSED.items()),
    ],
)
def test_check_agrees_with_the_start_of_an_engine_and_changes_nothing(
    folder, text, good, monkeypatch, request, capsys, caplog
):
    if "extra" in request.node.callspec.id:
        monkeypatch.delitem(sys.modules, "kvtier_observers.endpoint", raising=False)
        monkeypatch.setitem(sys.modules, "prometheus_client.core", None)
    if "unknown protocol" in request.node.callspec.id:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "pigeons")
    with contextlib.ExitStack() as closing:
        closing.callback(os.umask, os.umask(0o002))  # folders that are made too openly are refused
        port = closing.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1]
        for name, listens in ("live", True), ("dead", False):
            sock = closing.enter_context(socket.socket(socket.AF_UNIX))
            sock.bind(str(folder / name))
            if listens:
                sock.listen(9)
            else:
                sock.close()
        if "locked" in text:
            closing.callback(opened_engine("another", file_of(disk("locked")), folder).close)
        text = text.replace("TAKEN", f"{port}").replace("PORT", f"{free_port()}")
        assert agrees(text, folder, capsys, caplog) is good


@pytest.mark.parametrize(
    ("before", "text", "good"),
    [
        pytest.param(file_of(gds("new", "48MiB")), file_of(gds("new", "48MiB")), True, id="by its own slab"),
        pytest.param(file_of(gds("new", "48MiB")), file_of(gds("new", "16MiB")), True, id="by a slab that shrinks"),
        pytest.param(file_of(), file_of(gds("new", "8MiB")), False, id="by others"),
        pytest.param(file_of(), file_of(gds("new", "8MiB", required="false")), True, id="by others, of no account"),
        pytest.param(file_of(), file_of(disk("new"), more=["status: HERE/s"]), True, id="a disk"),
    ],
)
def test_check_agrees_on_a_full_disk(tmp_path, before, text, good, capsys, caplog):
    with tmpfs(tmp_path, 64 << 20) as small:
        opened_engine("before", before, small.folder).close()
        (small.folder / "kvtier.yaml").write_bytes(bytes(4096))  # there is no room for it later
        small.fill()
        assert agrees(text, small.folder, capsys, caplog) is good


@pytest.mark.parametrize(
    ("before", "text", "good"),
    [
        pytest.param(file_of(), file_of(gds("a", "24MiB"), gds("b", "24MiB")), True, id="both fit"),
        pytest.param(file_of(), file_of(gds("a", "40MiB"), gds("b", "40MiB")), False, id="each fits"),
        pytest.param(file_of(), file_of(gds("a", "80MiB").replace("]", ", HERE/b]")), False, id="halves"),
        pytest.param(file_of(gds("a", "48MiB")), file_of(gds("a", "8MiB"), gds("b", "40MiB")), True, id="one shrinks"),
        pytest.param(
            file_of(),
            file_of(gds("a", "40MiB", required="false"), gds("b", "40MiB")),
            False,
            id="the first is optional",
        ),
    ],
)
def test_check_agrees_on_slabs_that_share_a_disk(tmp_path, before, text, good, capsys, caplog):
    with tmpfs(tmp_path, 64 << 20) as small:
        opened_engine("before", before, small.folder).close()
        assert agrees(text, small.folder, capsys, caplog) is good


@pytest.mark.parametrize(("made", "good"), [(True, True), (False, False)])
@pytest.mark.parametrize("tier", [gds("new", "8MiB"), disk("new")], ids=["gds", "disk"])
def test_check_agrees_on_a_disk_without_inodes(tmp_path, made, good, tier, capsys, caplog):
    with ext4(tmp_path, 64 << 20) as small:
        opened_engine("kvtier", file_of(tier) if made else file_of(), small.folder).close()
        with contextlib.suppress(OSError):
            for number in range(1000):
                (small.folder / f"{number}").touch()
        assert agrees(file_of(tier), small.folder, capsys, caplog) is good


def agrees(text, folder, capsys, caplog):
    """Does an engine start? A check says so."""
    checked = check(text, folder, capsys, caplog)
    started = start(text, folder, caplog)
    # What shows without opening anything is told before anything is opened.
    assert checked == started or (started[0] and checked[0] and not checked[1])
    assert set(started[0]) <= set(checked[0]) or set(checked[0]) <= set(started[0])
    return not started[0]


@pytest.fixture
def strangers(monkeypatch, imported):
    """A folder of another account, which this process becomes; below ``locked`` only root finds anything."""
    registry, commands = imported
    monkeypatch.setattr(Registry, "discover", lambda: registry)
    monkeypatch.setattr("kvtier_core.cli.entry_points", lambda group: commands)
    with tempfile.TemporaryDirectory(prefix="kvtier-stranger-") as home:
        folder = Path(home)
        (folder / "locked/inner").mkdir(parents=True, mode=0o700)
        (folder / "locked").chmod(0o700)
        os.chown(folder, STRANGER, STRANGER)
        monkeypatch.setenv("XDG_RUNTIME_DIR", home)
        monkeypatch.setenv("XDG_CACHE_HOME", f"{home}/cache")
        with as_stranger():
            yield folder


@pytest.fixture(scope="module")
def imported(tmp_path_factory):
    """Plugins and commands, which import nothing any more: the checkout may be its owner's alone."""
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    registry, commands = Registry.discover(), entry_points(group="kvtier.commands")
    folder = tmp_path_factory.mktemp("imported")
    for text, _ in (*LOCKED.values(), LOCKED["an optional disk"]):
        opened_engine("kvtier", text, folder).close()
    for name, *options in (("check", "--open"), ("doctor",), ("clear", "--yes")):
        main([name, str(folder / "kvtier.yaml"), *options])
    return registry, [each for each in commands if each.value.startswith("kvtier_doctor.")]


@contextlib.contextmanager
def as_stranger():
    groups = os.getgroups()
    os.setgroups([])
    os.setegid(STRANGER)
    os.seteuid(STRANGER)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)
        os.setgroups(groups)


LOCKED = {
    "a disk": (file_of(disk("locked/inner")), False),
    "a new disk": (file_of(disk("locked/new/store")), False),
    "an optional disk": (file_of(disk("locked/inner", required="false")), True),
    "an optional new disk": (file_of(disk("locked/new/store", required="false")), True),
    "an optional slab": (file_of(gds("locked/inner", required="false")), True),
    "an optional folder that engines share": (file_of(disk("locked/inner", shared="true", required="false")), True),
    "events": (file_of(observers=["{type: jsonl, path: HERE/locked/events}"]), False),
    "a recording": (file_of(observers=["{type: recording, path: HERE/locked/inner/recorded}"]), False),
    "metrics": (file_of(observers=["{type: prometheus, socket: HERE/locked/metrics}"]), False),
    "a status socket": (file_of(more=["status: HERE/locked/inner/status"]), True),
}


@pytest.mark.parametrize(("text", "good"), LOCKED.values(), ids=LOCKED)
def test_check_agrees_below_a_folder_of_another_user(strangers, text, good, capsys, caplog):
    assert agrees(text, strangers, capsys, caplog) is good


@pytest.mark.parametrize("command", [("check",), ("check", "--model", "HERE/model"), ("doctor",), ("clear", "--yes")])
def test_commands_say_that_a_folder_is_another_users(strangers, command, capsys):
    (strangers / "model").mkdir()
    (strangers / "model/config.json").write_text(
        '{"num_hidden_layers": 1, "num_attention_heads": 1, "hidden_size": 64}'
    )
    (strangers / "kvtier.yaml").write_text(LOCKED["an optional disk"][0].replace("HERE", str(strangers)))
    name, *options = (word.replace("HERE", str(strangers)) for word in command)
    assert main([name, str(strangers / "kvtier.yaml"), *options]) in (FINE, PROBLEMS, USAGE)
    assert "Traceback" not in capsys.readouterr().err


NAMES = "a", "b", "c"


def drawn_path(draw, folder):
    return "/".join(draw.choices(NAMES, k=draw.randint(1, 3)))


def draw_tree(draw, folder):
    """Folders, files, links and what tiers leave, in random places, with random modes and owners."""
    for _ in range(draw.randint(0, 6)):
        path = folder / drawn_path(draw, folder)
        with contextlib.suppress(OSError):
            match draw.choice(["folder", "folder", "file", "link", "slab", "disk", "shared", "socket", "lock"]):
                case "folder":
                    path.mkdir(parents=True)
                    path.chmod(draw.choice([0o700, 0o700, 0o755, 0o777, 0o1777, 0o2770, 0o4700, 0o6770, 0o500]))
                case "file":
                    path.write_text("")
                    path.chmod(draw.choice([0o600, 0o644]))
                case "link":
                    path.symlink_to(folder / drawn_path(draw, folder))
                case "socket":
                    with socket.socket(socket.AF_UNIX) as sock:
                        sock.bind(str(path))
                case "lock":
                    (path / ".kvtier-lock").touch(draw.choice([0o600, 0o644]))
                case "shared":
                    (path / ".kvtier-shared").touch(draw.choice([0o600, 0o644]))
                case "slab" | "disk" as kind:
                    rest = str(path.relative_to(folder))
                    with contextlib.suppress(ConfigError):
                        opened_engine(
                            "before", file_of(gds(rest, "16MiB") if kind == "slab" else disk(rest)), folder
                        ).close()
    for path in sorted(folder.rglob("*")):
        if path.is_symlink() or path.suffix == ".yaml":
            continue
        match draw.randrange(12):
            case 0:
                path.chmod(
                    draw.choice([0o700, 0o755, 0o777, 0o4770, 0o6770] if path.is_dir() else [0o600, 0o644, 0o660])
                )
            case 1 if os.geteuid() == 0:
                os.chown(path, STRANGER, STRANGER)
            case 2 if path.is_file():
                path.unlink()
                path.mkdir()
            case 3 if path.is_file():
                path.with_name(f"{path.name}-linked").hardlink_to(path)


def drawn_file(draw, folder):
    def path():
        return drawn_path(draw, folder)

    def settings():
        return draw.choice([{}, {"required": "false"}])

    tiers_of = [
        lambda: disk(path(), **settings()),
        lambda: disk(path(), shared="true", **settings()),
        lambda: gds(path(), draw.choice(["8MiB", "32MiB", "1000TiB"]), **settings()),
        lambda: disk(path(), serializer="int8", **UNMEASURED),
    ]
    observers_of = [
        lambda: f"{{type: jsonl, path: HERE/{path()}, capacity: 1MiB}}",
        lambda: f"{{type: prometheus, socket: HERE/{path()}}}",
        lambda: f"{{type: recording, path: HERE/{path()}}}",
    ]
    more = draw.choice([[], [f"status: HERE/{path()}"], ["status: 'off'"]])
    more += draw.choice([[], [], [], ["chunk_tokens: 40"]])
    return file_of(
        *(draw.choice(tiers_of)() for _ in range(draw.randint(0, 3))),
        observers=[draw.choice(observers_of)() for _ in range(draw.choice([0, 0, 1, 2]))],
        more=more,
    )


@pytest.mark.long
@pytest.mark.parametrize("seed", range(20 * LONG))
def test_check_agrees_at_random(tmp_path, monkeypatch, seed, capsys, caplog):
    draw = random.Random(seed)
    folder = tmp_path / "drawn"
    folder.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    draw_tree(draw, folder)
    text = drawn_file(draw, folder)
    umask = os.umask(draw.choice([0o022, 0o002, 0o077]))
    try:
        agrees(text, folder, capsys, caplog)
    finally:
        os.umask(umask)
