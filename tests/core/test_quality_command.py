"""`kvtier quality` before it starts an engine: what it is asked is wrong."""

from __future__ import annotations

import pytest

from kvtier_core.cli import main, quality
from kvtier_core.cli.output import USAGE


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--codec", "{type: packed"], "--codec '{type: packed' cannot be read"),
        (["--codec", "zip9"], "no serializer 'zip9' is installed"),
        (["--codec", "{type: packed, level: 3}"], "unknown key 'level'"),
        (["--codec", "packed", "--out", "nowhere/report.json"], "there is no folder nowhere"),
        (["--codec", "packed", "--prompts", "nowhere.txt"], "nowhere.txt holds no prompts"),
        (["--codec", "packed", "--folder", "nowhere"], "there is no folder nowhere"),
    ],
)
def test_errors_are_reported_before_an_engine_starts(tmp_path, monkeypatch, capsys, arguments, why):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delattr(quality.Measuring, "score")
    assert main(["quality", "--model", "model", *arguments]) == USAGE
    assert why in capsys.readouterr().err
