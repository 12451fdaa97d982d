"""What docs/commands.md shows runs, and it names every command."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from kvtier_core.cli import parser

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
    (commands,) = (each.choices for each in parser()._actions if each.choices)
    assert [name for name in commands if f"kvtier {name}" not in PAGE] == []
