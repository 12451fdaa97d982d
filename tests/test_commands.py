"""What docs/commands.md shows runs, and it names every command."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from importlib.metadata import EntryPoint, version
from pathlib import Path

import pytest

from kvtier_core import cli

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/commands.md").read_text()


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def test_every_block_runs(tmp_path):
    (yaml,) = blocks("yaml")
    (tmp_path / "kvtier.yaml").write_text(yaml)
    bin_folder = tmp_path / "bin"
    bin_folder.mkdir()
    command = bin_folder / "kvtier"
    command.write_text(f"#!{sys.executable}\nimport sys\nfrom kvtier_core.cli import main\nsys.exit(main())\n")
    command.chmod(0o755)
    path = f"{bin_folder}:{os.environ['PATH']}"
    (tmp_path / "store").mkdir(mode=0o700)  # fsck reads a folder that is there
    for block in blocks("sh"):
        ran = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", block],
            cwd=tmp_path, env={**os.environ, "PATH": path}, capture_output=True, text=True,
        )  # fmt: skip
        assert ran.returncode == 0, ran.stdout + ran.stderr
    assert (tmp_path / "kvtier.schema.json").stat().st_size > 1000


def test_every_command_is_named():
    (commands,) = (each.choices for each in cli.parser()._actions if each.choices)
    assert [name for name in commands if f"kvtier {name}" not in PAGE] == []


def test_every_command_says_what_it_does():
    (commands,) = (each.choices for each in cli.parser()._actions if each.choices)
    assert [name for name, each in commands.items() if not (each.description or "").strip()] == []


def test_the_version_is_that_of_the_package(capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"kvtier {version('kvtier')}\n"


def ending_of(arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    return ended.value.code, capsys.readouterr().err


def test_every_command_of_another_package_has_its_extra():
    brought = {
        command: package.parent.name.removeprefix("kvtier_")
        for package in ROOT.glob("plugins/kvtier_*/pyproject.toml")
        for command in tomllib.loads(package.read_text())["project"].get("entry-points", {}).get("kvtier.commands", ())
    }
    assert brought == cli._EXTRAS


@pytest.mark.parametrize("command", cli._EXTRAS)
def test_a_command_whose_package_is_missing_names_it(command, monkeypatch, capsys):
    monkeypatch.setattr(cli, "entry_points", lambda group: [])
    told = f"kvtier {command}: not installed; pip install 'kvtier[{cli._EXTRAS[command]}]'\n"
    assert ending_of([command, "file", "--option", "--json"], capsys) == (2, told)


def test_a_command_that_cannot_be_imported_costs_no_other(monkeypatch, capsys):
    broken = EntryPoint("broken", "no_such_module", "kvtier.commands")
    hidden = EntryPoint("plugins", "no_such_module", "kvtier.commands")  # the core's own stay what they are
    monkeypatch.setattr(cli, "entry_points", lambda group: [broken, hidden])
    assert cli.main(["plugins"]) == 0
    capsys.readouterr()
    status, told = ending_of(["broken"], capsys)
    assert (status, told) == (2, "kvtier broken: no_such_module cannot be imported: No module named 'no_such_module'\n")
