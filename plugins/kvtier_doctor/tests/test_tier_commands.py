"""`kvtier doctor`, `clear` and `bench`, over real folders."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import threading

import pytest
from nodes import TOKEN, open_node
from servers.ports import free_port

from kvtier_core.cli import main
from kvtier_core.cli.output import FINE, PROBLEMS, USAGE
from kvtier_core.config.model import StoreTierConfig
from kvtier_core.config.registry import Registry
from kvtier_core.errors import BackendError
from kvtier_core.layouts import marked, tenant_mark
from kvtier_core.types import FRAME_ALIGNMENT
from kvtier_disk.config import DiskConfig
from kvtier_doctor import doctor
from kvtier_doctor.stores import walk
from kvtier_example_backend import plugin as example
from kvtier_example_backend.plugin import ExampleBackend, ExampleBackendConfig
from kvtier_testing.samples import make_context, make_frame, make_keys, make_namespace

NBYTES = 4 * FRAME_ALIGNMENT


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_file("{type: disk, capacity: 1GiB, path: store}")
    return tmp_path


def write_file(*tiers):
    lines = "".join(f"  - {tier}\n" for tier in ("{type: heap, capacity: 64MiB}", *tiers))
    with open("kvtier.yaml", "w") as file:
        file.write(f"version: 1\ntiers:\n{lines}")


def tree(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def filled(path, namespace="tiny", mark=b"", **settings):
    """A tier's folder with three frames, of the tenant with this mark; returns the digest of their namespace."""
    namespace = make_namespace(namespace)
    disk = DiskConfig(path=path, **settings).open(make_context(namespace=namespace))
    keys = marked(make_keys(3), mark)
    disk.write(keys, [make_frame(key, nbytes=NBYTES, namespace=namespace) for key in keys])
    disk.close()
    return namespace.digest.hex()


def frames(folder):
    return len(list(folder.rglob("*.kv")))


def test_the_doctor_measures_each_tier_and_leaves_nothing(folder, capsys):
    before = tree(folder)
    assert main(["doctor", "kvtier.yaml", "--json"]) == FINE
    told = json.loads(capsys.readouterr().out)
    heap, disk = told["tiers"]
    assert (heap["trouble"], disk["trouble"]) == ("", "")
    assert all(disk[rate] > 0 for rate in ("write", "read", "verify", "latency", "free"))
    assert any(line.startswith("direct: auto -> ") for line in disk["settings"])
    assert "page-locking takes about 128KiB of the memory of each GPU of an engine" in heap["settings"]
    assert told["machine"]["page size"] == "4KiB"
    assert told["verdict"].startswith("every tier works")
    assert tree(folder) == before


def test_the_doctor_tries_each_peer(folder, capsys):
    nobody = f"127.0.0.1:{free_port()}"
    with contextlib.closing(open_node()) as node:
        where = f"listen: '127.0.0.1:{free_port()}', peers: ['{node.address}', '{nobody}'], token: '{TOKEN}'"
        write_file(f"{{type: peers, {where}}}")
        assert main(["doctor", "kvtier.yaml", "--json"]) == FINE
    told = json.loads(capsys.readouterr().out)["tiers"][1]["settings"]
    assert any(re.fullmatch(rf"{node.address}: answers in \S+ ms, sends \S+ GB/s, protocol 2", line) for line in told)
    assert f"{nobody}: Connection refused" in told


def test_the_doctor_spares_what_is_stored(folder):
    filled(folder / "store")
    before = tree(folder)
    assert main(["doctor", "kvtier.yaml"]) == FINE
    assert tree(folder / "store") == [each.removeprefix("store/") for each in before if each.startswith("store/")]


def test_the_doctor_tells_what_cannot_be_used(folder, capsys):
    engine = DiskConfig(path=folder / "store").open(make_context())
    assert main(["doctor", "kvtier.yaml"]) == PROBLEMS
    engine.close()
    told = capsys.readouterr().out.splitlines()
    assert told[-2:] == [
        "disk cannot be used: kvtier.yaml:4: $.tiers[1]: store: another engine or tier keeps its frames here; "
        "stop it, or give each its own path",
        "1 of 2 tiers cannot be opened: an engine does not start with this file",
    ]


def test_the_doctor_tells_of_two_tiers_in_one_folder(folder, capsys):
    write_file(*["{type: disk, capacity: 1GiB, path: store}"] * 2)
    before = tree(folder)
    assert main(["doctor", "kvtier.yaml", "--json"]) == PROBLEMS
    told = json.loads(capsys.readouterr().out)
    assert [each["opens"] for each in told["tiers"]] == [True, True, False]
    assert "is also the folder of $.tiers[1]" in told["tiers"][2]["trouble"]
    assert told["verdict"] == "1 of 3 tiers cannot be opened: an engine does not start with this file"
    assert main(["check", "kvtier.yaml", "--open"]) == PROBLEMS
    assert tree(folder) == before


def test_the_doctor_says_that_an_engine_starts_without_its_redis(folder, capsys):
    write_file(f"{{type: redis, url: 'redis://127.0.0.1:{free_port()}'}}")
    assert main(["check", "kvtier.yaml", "--open"]) == FINE
    assert main(["doctor", "kvtier.yaml", "--json"]) == PROBLEMS
    out = capsys.readouterr().out
    told = json.loads(out[out.index("{\n") :])
    assert told["tiers"][1]["opens"] and "Connection refused" in told["tiers"][1]["trouble"]
    assert told["verdict"] == "1 of 2 tiers cannot be used: an engine starts, but finds nothing there"


def test_the_doctor_names_the_engine_that_it_assumes(folder, capsys):
    assert main(["doctor", "kvtier.yaml", "--prefill", "1e9"]) == FINE
    said = capsys.readouterr()
    assert "an engine that computes 1e+09 tokens a second (--prefill) of 128KiB each makes " in said.out
    assert "pass --model FOLDER for another model" in said.err


class Twisted(ExampleBackend):
    """Gives other bytes back than it was given."""

    def _read_one(self, key, view):
        count = super()._read_one(key, view)
        view[5000] ^= 1
        return count


class Forgetful(ExampleBackend):
    def write(self, keys, frames):
        pass


class Hanging(ExampleBackend):
    released = threading.Event()

    def write(self, keys, frames):
        self.released.wait()


@pytest.mark.parametrize(
    "backend, why",
    [
        (Twisted, "cannot read back a frame that was just written: "),
        (Forgetful, "a frame that was just written is missing"),
        (Hanging, "no answer within 0.5 s; is everything it needs running?"),
    ],
)
def test_the_doctor_believes_no_tier(folder, capsys, monkeypatch, backend, why):
    monkeypatch.setattr(example, "ExampleBackend", backend)
    monkeypatch.setattr(Registry, "discover", lambda: Registry.of(example))
    monkeypatch.setattr(doctor, "_PATIENCE", 1)
    timeout = "500ms" if backend is Hanging else "1min"
    write_file(f"{{type: example-backend, capacity: 1GiB, timeout: {timeout}}}")
    Hanging.released.clear()
    assert main(["doctor", "kvtier.yaml", "--json"]) == PROBLEMS
    Hanging.released.set()
    assert json.loads(capsys.readouterr().out)["tiers"][1]["trouble"].startswith(why)


def test_bench_stands_beside_plain_files_and_leaves_nothing(folder, capsys):
    before = tree(folder)
    assert main(["bench", "kvtier.yaml", "--frames", "4", "--rounds", "2", "--json"]) == FINE
    figures = json.loads(capsys.readouterr().out)["figures"]
    assert [(each["tier"], each["what"]) for each in figures] == [
        ("memory", "memcpy"),
        ("disk", "raw file, write"),
        ("disk", "raw file, read"),
        ("disk", "write"),
        ("disk", "read"),
        ("disk", "verify"),
    ]
    assert all(each["rate"] > 0 for each in figures)
    assert [each["what"] for each in figures if each["of_raw"]] == ["write", "read"]
    assert tree(folder) == before


def test_bench_needs_a_store_tier(folder, capsys):
    write_file()
    assert main(["bench", "kvtier.yaml"]) == USAGE
    assert capsys.readouterr().err == "kvtier.yaml: no tier below its arenas to measure\n"


def test_clear_removes_what_a_tier_holds(folder, capsys):
    filled(folder / "store"), filled(folder / "store", "other")
    assert main(["clear", "kvtier.yaml", "--yes", "--json"]) == FINE
    assert json.loads(capsys.readouterr().out) == {"disk": {"frames": 6, "nbytes": 6 * NBYTES, "failed": []}}
    assert frames(folder) == 0


def test_clear_removes_one_namespace_alone(folder, capsys):
    filled(folder / "store")
    other = filled(folder / "store", "other")
    for digits in (other, other[:8]):  # what a log shows, and its beginning
        assert main(["clear", "kvtier.yaml", "--yes", "--namespace", digits]) == FINE
        assert frames(folder) == 3
    assert [line for line in capsys.readouterr().out.splitlines()] == [
        f"disk: 3 frames removed, {3 * NBYTES // 1024}KiB",
        "disk: 0 frames removed, 0B",
    ]


@pytest.mark.parametrize("digits", ["xyz", "abc", ""])
def test_clear_wants_whole_digits(folder, digits):
    filled(folder / "store")
    if digits:
        assert main(["clear", "kvtier.yaml", "--yes", "--namespace", digits]) == USAGE
    else:
        with pytest.raises(SystemExit):
            main(["clear", "kvtier.yaml", "--yes", "--namespace"])
    assert frames(folder) == 3


def test_clear_spares_shared_stores_unless_told(folder, capsys):
    write_file("{type: disk, path: store, shared: true}")
    filled(folder / "store", shared=True)
    assert main(["clear", "kvtier.yaml", "--yes"]) == USAGE
    assert "other engines may use its frames; pass --shared" in capsys.readouterr().err
    assert frames(folder) == 3
    assert main(["clear", "kvtier.yaml", "--yes", "--shared"]) == FINE
    assert frames(folder) == 0


def test_clear_and_fsck_tell_the_tenants_of_a_shared_store_apart(folder, capsys, monkeypatch):
    monkeypatch.setenv("OURS", "ours")
    write_file("{type: disk, path: store, shared: true}")
    filled(folder / "store", shared=True, mark=tenant_mark("ours"))
    filled(folder / "store", shared=True)
    fsck = ["fsck", "disk", "--config", "kvtier.yaml", "--cache-salt", "env:OURS"]
    assert main(fsck) == PROBLEMS
    assert capsys.readouterr().out.count("of a request with this cache_salt\n") == 3
    assert main(["clear", "kvtier.yaml", "--yes", "--shared", "--cache-salt", "env:OURS"]) == FINE
    assert frames(folder) == 3 and main(fsck) == FINE
    assert main(["clear", "kvtier.yaml", "--yes", "--shared", "--cache-salt", "env:NOT_SET"]) == USAGE
    assert frames(folder) == 3


def test_clear_removes_nothing_of_a_tenant_if_a_tier_hides_its_keys_and_the_secret_is_missing(folder, monkeypatch):
    monkeypatch.setenv("OURS", "ours")
    own = "{{type: disk, capacity: 1GiB, path: {}}}".format
    write_file(own("store"), own("other, seal_key: 'env:NOT_SET'"))
    filled(folder / "store", mark=tenant_mark("ours"))
    assert main(["clear", "kvtier.yaml", "--yes", "--cache-salt", "env:OURS"]) == USAGE
    assert frames(folder) == 3


@pytest.mark.parametrize("answer, left", [("y", 0), ("n", 3), ("", 3)])
def test_clear_asks_before_it_removes(folder, capsys, monkeypatch, answer, left):
    filled(folder / "store")
    typed, terminal = pty.openpty()
    os.write(typed, f"{answer}\n".encode())
    with open(terminal) as stdin:
        monkeypatch.setattr("sys.stdin", stdin)
        assert main(["clear", "kvtier.yaml"]) == (PROBLEMS if left else FINE)
    os.close(typed)
    assert "Remove everything from disk? [y/N]" in capsys.readouterr().err
    assert frames(folder) == left


def test_clear_does_not_prompt_without_a_terminal(folder, capsys):
    filled(folder / "store")
    assert main(["clear", "kvtier.yaml"]) == USAGE
    assert frames(folder) == 3


def test_clear_leaves_a_tier_alone_that_an_engine_uses(folder, capsys):
    filled(folder / "store")
    engine = DiskConfig(path=folder / "store").open(make_context())
    assert main(["clear", "kvtier.yaml", "--yes"]) == USAGE
    engine.close()
    assert "another engine or tier keeps its frames here" in capsys.readouterr().err
    assert frames(folder) == 3


def test_a_tier_need_not_be_walked():
    tier = StoreTierConfig("example", ExampleBackendConfig())
    with pytest.raises(BackendError, match="a tier of type example-backend cannot list its frames"):
        walk(tier)
