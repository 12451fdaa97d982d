"""`python -m benchmarks` shows each table when it is made, and every section has a short form."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.__main__ import SECTIONS

ROOT = Path(__file__).parents[1]
SECTION = """
import time
from benchmarks.measure import Table

def tables(folder):
    yield Table("{title}", "", ("",), [])
    {then}
"""
#: What each of these sections does after its table.
MADE_UP = {"first": "", "failing": "raise RuntimeError('no such store')", "endless": "time.sleep(3600)", "last": ""}


def start(place: Path, *words: str) -> subprocess.Popen:
    for name, then in MADE_UP.items():
        (place / f"a_{name}.py").write_text(SECTION.format(title=f"Of {name}", then=then))
    sections = {name: f"a_{name}" for name in MADE_UP}
    # A shell has the processes that it puts into the background ignore SIGINT, and their children too.
    code = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler)"
    code += f"; import benchmarks.__main__ as it; sys.exit(it.main(sys.argv[1:], {sections}))"
    return python("-c", code, *words, PYTHONPATH=f"{ROOT}:{place}")


def python(*words: str, **variables: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, *words],
        cwd=ROOT,
        env=os.environ | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def titles(output: str) -> list[str]:
    return [line for line in output.splitlines() if line.startswith("## ")]


def test_a_failing_section_stops_no_other(tmp_path):
    run = start(tmp_path, "first", "failing", "last")
    output, errors = run.communicate()
    assert run.returncode == 1
    assert titles(output) == ["## Of first", "## Of failing", "## Of last"]
    assert "RuntimeError: no such store" in errors
    assert errors.endswith("failed: failing\n")


def test_an_interrupted_run_has_printed_its_tables_and_names_what_was_not_run(tmp_path):
    with start(tmp_path, "first", "endless", "last") as run:
        lines = iter(run.stdout.readline, "")
        shown = [next(line for line in lines if line.startswith("## ")) for _ in range(2)]  # before the section ends
        run.send_signal(signal.SIGINT)
        errors = run.stderr.read()
    assert shown == ["## Of first\n", "## Of endless\n"]
    assert run.returncode == 130
    assert errors.endswith("interrupted: endless has not ended; sections that were not run: last\n")


def test_the_short_form_says_so_and_writes_no_results(tmp_path):
    output, _ = start(tmp_path, "--short", "first").communicate()
    assert output.startswith("The short form: ")
    refused = start(tmp_path, "--short", "--write", "first")
    assert "not allowed with argument" in refused.communicate()[1]
    assert refused.returncode == 2


def test_every_section_has_a_short_form():
    modules = {name: module.removeprefix("benchmarks.") for name, module in SECTIONS.items()}
    modules["hosts"] = "host_sides"  # which has the sizes for all hosts
    texts = {name: (ROOT / f"benchmarks/{module}.py").read_text() for name, module in modules.items()}
    assert [name for name, text in texts.items() if " = sized(" not in text] == []


@pytest.mark.parametrize("section", ["copies", "seals", "lookup", "entries"])
def test_a_section_that_starts_nothing_runs_in_its_short_form(section, tmp_path):
    run = python("-m", "benchmarks", "--short", "--folder", str(tmp_path), section)
    output, errors = run.communicate()
    assert run.returncode == 0, errors
    assert titles(output)
