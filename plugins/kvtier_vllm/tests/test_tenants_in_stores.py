"""The frames of a tenant of real engines are told apart in their store, by commands that no engine helps."""

from __future__ import annotations

import json

import pytest
from real_engines import cpu, hit, prompt

from kvtier_core.cli import main
from kvtier_core.cli.output import FINE, PROBLEMS

ASKED = prompt(180, 530)
CHUNKS, HITS = 8, 512


def found_by(capsys, *arguments):
    """The exit status of a command, and what it found."""
    capsys.readouterr()
    status = main([*arguments, "--json"])
    return status, json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("sealed", [{}, {"seal_key": "env:KVTIER_TEST_SEAL", "encrypt": True}], ids=["plain", "sealed"])
def test_a_tenant_is_removed_alone_and_its_receipt_can_be_checked(engine, tmp_path, capsys, monkeypatch, sealed):
    monkeypatch.setenv("KVTIER_TEST_SEAL", "5e4a10f77be2c0917d36a84407b3c9d2")
    monkeypatch.setenv("OURS", "ours")
    stack = cpu()
    disk = {"type": "disk", "path": str(tmp_path / "disk"), "capacity": "1GiB", "min_free": "0B", **sealed}
    stack["tiers"].append(disk)
    config = tmp_path / "kvtier.yaml"
    config.write_text(json.dumps(stack))
    with engine(stack) as served:
        for salt in ("ours", "theirs", None):
            served.ask(ASKED, salt=salt)
        served.settle()
    condemned = ["--cache-salt", "env:OURS"]
    fsck = ["fsck", "disk", "--config", str(config), *condemned]
    status, told = found_by(capsys, *fsck)
    assert status == PROBLEMS and told["found"]["of the tenant"]["frames"] == CHUNKS
    assert told["found"]["whole"]["frames"] == 2 * CHUNKS
    status, told = found_by(capsys, "clear", str(config), "--yes", *condemned)
    assert status == FINE and told["disk"]["frames"] == CHUNKS
    assert found_by(capsys, *fsck)[0] == FINE
    with engine(stack) as served:
        loaded = {}
        for salt in ("ours", "theirs", None):
            served.ask(ASKED, salt=salt)
            loaded[salt] = served.outcomes()[-1]
        assert loaded["ours"].loaded == 0 and loaded["theirs"] == loaded[None] == hit(530, disk=HITS)
        served.settle()


def test_the_prompt_of_a_tenant_is_exported(engine, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("OURS", "ours")
    stack = cpu()
    stack["tiers"].append({"type": "disk", "path": str(tmp_path / "disk"), "capacity": "1GiB", "min_free": "0B"})
    config, asked = tmp_path / "kvtier.yaml", tmp_path / "asked.json"
    config.write_text(json.dumps(stack))
    asked.write_text(json.dumps(ASKED))
    with engine(stack) as served:
        served.ask(ASKED, salt="ours")
        served.settle()
    export = ["export", "disk", str(tmp_path / "ours.kvbundle"), "--config", str(config), "--prompt", str(asked)]
    assert main(export) != FINE, "no request without the salt has stored it"
    assert main([*export, "--cache-salt", "env:OURS"]) == FINE
    assert f"{CHUNKS} of {CHUNKS} chunks" in capsys.readouterr().out
