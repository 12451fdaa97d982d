"""The command line, run as users run it."""

from __future__ import annotations

import pytest

from kvtier_core.cli import main
from kvtier_core.errors import BackendError
from kvtier_example_backend.plugin import ExampleBackendConfig


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def install_broken(folder):
    info = folder / "kvtier_nope-0.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: kvtier-nope\nVersion: 0.1\n")
    (info / "entry_points.txt").write_text("[kvtier.v1]\nnope = kvtier_nope_missing\n")


def test_plugins_lists_what_there_is(folder, capsys):
    assert main(["plugins", "--strict"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == ["kind", "name", "plugin", "version"]
    assert ["eviction", "policy", "lru", "kvtier:builtin"] in [line[:4] for line in lines]


def test_plugins_tells_what_is_broken(folder, capsys):
    install_broken(folder)
    assert main(["plugins"]) == 0
    assert main(["plugins", "--strict"]) == 1
    told = capsys.readouterr().out.splitlines()
    assert told.count("broken: kvtier-nope:nope 0.1: ModuleNotFoundError: No module named 'kvtier_nope_missing'") == 2


def test_check_shows_every_setting_and_its_origin(folder, capsys):
    (folder / "kvtier.yaml").write_text("version: 1\nload_wait: 500ms\ntiers:\n  - {type: heap, capacity: 1GiB}\n")
    assert main(["check", "kvtier.yaml"]) == 0
    told = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert told == [
        ["$.tiers[0].type", "heap", "kvtier.yaml:4"],
        ["$.tiers[0].capacity", "1GiB", "kvtier.yaml:4"],
        ["$.tiers[0].eviction", "gittins", "default"],
        ["$.tiers[0].eviction.classes", "full", "default"],
        ["$.tiers[0].store_after", "1", "default"],
        ["$.chunk_tokens", "auto", "default"],
        ["$.token_database", "chained", "default"],
        ["$.load_wait", "0.5s", "kvtier.yaml:2"],
        ["$.load", "auto", "default"],
        ["$.save_decode", "false", "default"],
        ["$.identity.weights", "full", "default"],
        ["$.on_reset", "forget", "default"],
        ["$.record", "~", "default"],
    ]


def test_check_tells_every_problem(folder, capsys):
    (folder / "kvtier.yaml").write_text("version: 1\nchunks: 3\ntiers: []\n")
    assert main(["check", "kvtier.yaml"]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.splitlines() == [
        "kvtier.yaml:2: $.chunks: unknown key 'chunks'; did you mean 'chunk_tokens'?",
        "kvtier.yaml:3: $.tiers: a stack needs at least one tier",
    ]


def test_a_command_is_needed(capsys):
    with pytest.raises(SystemExit) as left:
        main([])
    assert left.value.code == 2
    assert capsys.readouterr().err.splitlines()[-1] == "kvtier: error: the following arguments are required: COMMAND"


def test_a_tier_need_not_be_walked():
    with (
        pytest.raises(BackendError, match="a tier of type example-backend cannot be walked"),
        ExampleBackendConfig().walk(),
    ):
        pass
