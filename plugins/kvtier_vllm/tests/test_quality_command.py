"""`kvtier quality` before it starts an engine: what it is asked is wrong."""

from __future__ import annotations

import pytest

from kvtier_core.cli import main
from kvtier_core.cli.output import USAGE
from kvtier_vllm.quality import command as quality


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--codec", "{type: packed"], "cannot read --codec '{type: packed'"),
        (["--codec", "zip9"], "no serializer 'zip9' is installed"),
        (["--codec", "{type: packed, level: 3}"], "unknown key 'level'"),
        (["--codec", "packed", "--out", "nowhere/report.json"], "folder nowhere does not exist"),
        (["--codec", "packed", "--prompts", "nowhere.txt"], "cannot read prompts from nowhere.txt"),
        (["--codec", "packed", "--folder", "nowhere"], "folder nowhere does not exist"),
    ],
)
def test_errors_are_reported_before_an_engine_starts(tmp_path, monkeypatch, capsys, arguments, why):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delattr(quality.Measuring, "score")
    assert main(["quality", "--model", "model", *arguments]) == USAGE
    assert why in capsys.readouterr().err


def test_without_the_connector_it_says_what_to_install(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(quality.importlib.util, "find_spec", lambda name: None)
    assert main(["quality", "--model", "model", "--codec", "packed"]) == USAGE
    assert "pip install 'kvtier[vllm]'" in capsys.readouterr().err
