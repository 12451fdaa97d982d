"""`kvtier conform` tries a tier where it is, tells what it found, and leaves nothing behind."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from xml.etree import ElementTree

import pytest
from sizes import some

from kvtier_core.cli import main
from kvtier_disk.config import DiskConfig
from kvtier_gds.config import GdsConfig
from kvtier_testing import ArenaLaws, BackendLaws, SerializerLaws, laws_of
from kvtier_testing.samples import make_context, make_frame, make_keys, make_namespace

BROKEN = """
    import attrs
    from typing import ClassVar
    from kvtier_core.errors import BackendError
    from kvtier_core.hookspecs import hookimpl
    from kvtier_core.interfaces import Backend, BackendConfig, Serializer, SerializerConfig

    @attrs.frozen
    class FirstByteConfig(BackendConfig):
        type: ClassVar[str] = "firstbyte"
        def open(self, ctx):
            return FirstByte()

    class FirstByte(Backend):
        "Names frames by the first byte of their keys, and refuses those of 1 MiB."
        def __init__(self):
            self.frames = {}
        def contains(self, keys):
            return [key[0] in self.frames for key in keys]
        def read(self, keys, into):
            return [self.one(key, view) for key, view in zip(keys, into)]
        def one(self, key, view):
            frame = self.frames.get(key[0], b"")
            if len(frame) > len(view):
                return 0
            view[: len(frame)] = frame
            return len(frame)
        def write(self, keys, frames):
            return [self.put(key, frame) for key, frame in zip(keys, frames)]
        def put(self, key, frame):
            if len(frame) >= 1 << 20:
                return BackendError("too long")
            self.frames[key[0]] = bytes(frame)
        def delete(self, keys):
            for key in keys:
                self.frames.pop(key[0], None)

    @attrs.frozen
    class BrokenConfig(SerializerConfig):
        type: ClassVar[str] = "broken"
        lossless: ClassVar[bool] = True
        def open(self, ctx):
            return Broken()

    class Broken(Serializer):
        "Loses the last byte."
        def bound(self, layout):
            return layout.payload_nbytes
        def encode(self, payload, into):
            into[: len(payload)] = payload
            return len(payload)
        def decode(self, encoded, into):
            into[: len(encoded) - 1] = encoded[:-1]
            return len(into)

    @hookimpl
    def kvtier_backends():
        return [FirstByteConfig]

    @hookimpl
    def kvtier_serializers():
        return [BrokenConfig]
"""


@pytest.fixture
def file(tmp_path, monkeypatch) -> Path:
    """A configuration with an arena, a disk of one engine and a shared one, and a tier that is broken."""
    packages = tmp_path / "packages"
    info = packages / "kvtier_firstbyte-0.3.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: kvtier-firstbyte\nVersion: 0.3\n")
    (info / "entry_points.txt").write_text("[kvtier.v1]\nfirstbyte = firstbyte\n")
    (packages / "firstbyte.py").write_text(textwrap.dedent(BROKEN))
    monkeypatch.syspath_prepend(str(packages))
    monkeypatch.setenv("PYTHONPATH", str(packages))
    written = tmp_path / "kvtier.yaml"
    written.write_text(
        "version: 1\ntiers:\n"
        "  - {type: cpu, capacity: 64MiB}\n"
        f"  - {{type: disk, path: {tmp_path}/disk, capacity: 64KiB}}\n"
        f"  - {{type: disk, path: {tmp_path}/shared, capacity: 64KiB, shared: true}}\n"
        "  - {type: firstbyte, capacity: 64MiB}\n"
    )
    return written


def entries(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(("tier", "folder", "shared"), some([("disk", "disk", False), ("disk#2", "shared", True)]))
def test_a_store_keeps_the_laws_and_all_that_it_held(file, tmp_path, capsys, tier, folder, shared):
    """More lies in it, of another model, than its capacity of now."""
    ctx, keys = make_context(namespace=make_namespace("a user's"), capacity=0 if shared else 1 << 30), make_keys(9)
    backend = DiskConfig(path=tmp_path / folder, shared=shared).open(ctx)
    backend.write(keys, [make_frame(key) for key in keys])
    backend.close()
    before = entries(tmp_path / folder)
    assert main(["conform", tier, "--config", str(file), "--json"]) == 0
    assert entries(tmp_path / folder) == before
    report = json.loads(capsys.readouterr().out)
    assert (report["tier"], report["plugin"]) == (tier, "kvtier-disk:disk 0.1.0")
    assert (report["verdict"], report["shared"]) == ("kept", shared)
    assert min(report["throughput"].values()) > 0
    outcomes = {law["name"]: law["outcome"] for law in report["laws"]}
    assert outcomes.keys() >= set(laws_of(BackendLaws))
    assert ("test_absence_is_asked" in outcomes) == shared
    assert outcomes["test_two_namespaces_never_meet"] == "kept"
    assert outcomes["test_scan_finds_what_survived"] == ("not tried" if shared else "kept")
    assert outcomes["test_what_other_namespaces_left_counts_against_the_capacity"] == "not tried"


@pytest.mark.more
def test_slabs_are_tried_beside_those_that_an_engine_uses(tmp_path, capsys):
    """They take their capacity at once, so that neither an endless one nor a small one would do."""
    folders = [tmp_path / "first", tmp_path / "second"]
    config, keys = GdsConfig(paths=tuple(folders)), make_keys(9)
    backend = config.open(make_context(namespace=make_namespace("a user's"), capacity=1 << 20))
    backend.write(keys, [make_frame(key) for key in keys])
    before = entries(tmp_path)
    file = tmp_path / "kvtier.yaml"
    file.write_text(
        f"version: 1\ntiers:\n  - {{type: gds, paths: [{folders[0]}, {folders[1]}], capacity: 1MiB, staging: 64MiB}}\n"
    )
    assert main(["conform", "gds", "--config", str(file), "--json"]) == 0
    file.unlink()
    assert entries(tmp_path) == before
    assert [path for path in tmp_path.rglob("*") if path.is_dir()] == folders
    assert all(backend.contains(keys))
    backend.close()
    report = json.loads(capsys.readouterr().out)
    assert (report["verdict"], report["plugin"]) == ("kept", "kvtier-gds:gds 0.1.0")
    outcomes = {law["name"]: law["outcome"] for law in report["laws"]}
    assert outcomes["test_two_namespaces_never_meet"] == outcomes["test_scan_finds_what_survived"] == "kept"


def test_an_arena_keeps_the_laws(file, capsys):
    assert main(["conform", "cpu", "--config", str(file)]) == 0
    told = capsys.readouterr().out
    assert "cpu of " in told and "plugin kvtier-cpu:cpu" in told and told.endswith("verdict: kept\n")
    assert "GB/s" not in told


def test_a_tier_that_breaks_laws_is_told_which_and_what_follows(file, tmp_path, capsys):
    junit = tmp_path / "laws.xml"
    why = "test_bytes_read_are_bytes_written=known: see our tracker"
    assert main(["conform", "firstbyte", "--config", str(file), "--junit", str(junit), "--excuse", why]) == 1
    told = capsys.readouterr().out
    assert "writes 0.00 GB/s, reads back 0.00 GB/s" in told
    assert "broken: test_keys_are_any_32_bytes\n" in told
    assert "Otherwise two prompts would overwrite each other's frame" in " ".join(told.split())
    assert "python -m pydoc kvtier_core.interfaces.store_tier" in " ".join(told.split())
    assert "not tried: test_bytes_read_are_bytes_written: known: see our tracker\n" in told
    assert told.endswith("verdict: broken\n")
    failed = {
        case.get("name") for case in ElementTree.parse(junit).iter("testcase") if case.find("failure") is not None
    }
    assert "test_keys_are_any_32_bytes" in failed and "test_close_twice" not in failed


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["conform", "s3"], "has no tier 's3'; it has: cpu, disk, disk#2, firstbyte"),
        (["conform", "cpu", "--excuse", "test_of_nothing=because"], "excuses test_of_nothing, which is not a law"),
        (["conform", "cpu", "--excuse", "test_close_twice="], "excuses test_close_twice without a reason"),
        (["conform", "cpu", "--excuse", "test_close_twice"], "excuses test_close_twice without a reason"),
    ],
)
def test_tiers_that_cannot_be_tried_are_refused(file, capsys, arguments, why):
    assert main([*arguments, "--config", str(file)]) == 2
    told = capsys.readouterr()
    assert why in told.err
    assert not told.out


@pytest.mark.parametrize("serializer", some(["{type: zstd, level: 3}", "packed", "broken"], "broken"))
def test_the_serializer_of_a_tier_is_tried_too(file, capsys, serializer):
    """With its options; what only its own tests can know is not tried."""
    file.write_text(file.read_text().replace("path: ", f"serializer: {serializer}, path: ", 1))
    excused = ["--excuse", "test_garbage_does_no_harm=slow"]
    assert main(["conform", "disk", "--config", str(file), "--json", *excused]) == (serializer == "broken")
    outcomes = {law["name"]: law["outcome"] for law in json.loads(capsys.readouterr().out)["laws"]}
    assert outcomes.keys() >= set(laws_of(SerializerLaws)) - {"test_garbage_does_no_harm"}
    assert outcomes["test_a_payload_comes_back_in_full"] == ("broken" if serializer == "broken" else "kept")
    assert outcomes["test_other_options_are_another_codec"] == ("not tried" if "level" in serializer else "kept")
    assert outcomes["test_garbage_does_no_harm[0]"] == "not tried"


def test_a_store_that_an_engine_uses_is_left_alone(file, tmp_path, capsys):
    backend = DiskConfig(path=tmp_path / "disk").open(make_context())
    assert main(["conform", "disk", "--config", str(file)]) == 2
    backend.close()
    assert "another engine or tier keeps its frames here" in capsys.readouterr().err


def test_a_failing_law_explains_itself_in_any_project(file, tmp_path, pytester_like):
    told = pytester_like(
        "from kvtier_testing import BackendLaws\nfrom firstbyte import FirstByteConfig\n"
        "class TestMine(BackendLaws):\n    def config(self, folder):\n        return FirstByteConfig()\n"
    )
    assert told.count("the law ---") == told.count("\nE   AssertionError") > 0
    assert "docs/plugins.md" in told


@pytest.fixture
def pytester_like(tmp_path):
    """Runs pytest on a file of tests in a process of its own; returns what it prints."""
    import subprocess
    import sys

    def run(tests: str) -> str:
        (tmp_path / "pytest.ini").write_text("[pytest]\n")
        (tmp_path / "test_mine.py").write_text(tests)
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--tb=short", "test_mine.py"]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True).stdout

    return run


def test_every_law_says_what_an_engine_would_do_without_it():
    import kvtier_testing as kit

    suites = [getattr(kit, name) for name in kit.__all__ if name.endswith("Laws") and name != "Laws"]
    assert ArenaLaws in suites and len(suites) >= 6
    dumb = {
        f"{suite.__name__}.{law}"
        for suite in suites
        for law in laws_of(suite)
        if "\n\nOtherwise " not in (getattr(suite, law).__doc__ or "").replace("\n        ", "\n")
    }
    assert not dumb
