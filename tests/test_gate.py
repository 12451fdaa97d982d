"""What a commit must pass is short, is known, and says the same twice."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from sizes import some
from source_copy import ROOT

GATE = ["programs", "venv", "demo", "test", "test-engines", "docs"]
MAKEFILE = "works fails venv after:\n\t@python3 $@.py\n"
SUITE = ROOT / "tests/suite.py"

FIRST = """
import os, pytest
def first(name="ran"):
    "Whether this is called for the first time in this folder."
    ran = os.path.exists(name)
    open(name, "w").close()
    return not ran
"""
#: Modules of tests, by what goes wrong.
TESTS = {
    "always": "def test_it(): assert False",
    "once": "def test_it(): assert not first(), 'a defect'",
    "once, then skipped": "def test_it(): assert not first(); pytest.skip()",
    "its process ends": "def test_it(): first() and os._exit(1)",
    "it cannot be imported": "assert not first()",
}


def parts() -> list[str]:
    """Of `make test-all`."""
    command = ["make", "--dry-run", "--no-print-directory", "test-all"]
    environment = {name: value for name, value in os.environ.items() if name not in ("FROM", "WITHOUT", "MAKEFLAGS")}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    return done.stdout.split("tests/steps.py ")[1].split()


def test_the_gate_has_these_steps_and_no_other():
    assert re.findall(r"tests/steps.py (.*)", (ROOT / ".ci/run").read_text()) == [" ".join(GATE)]


def test_all_is_the_gate_and_what_the_forge_runs_beside_it():
    jobs = yaml.safe_load((ROOT / ".github/workflows/test.yml").read_text())["jobs"]
    assert jobs["gate"]["steps"][-1]["run"] == "bash .ci/run"
    assert GATE + jobs["part"]["strategy"]["matrix"]["target"] == parts()


def steps(folder: Path, *arguments: str, **scripts: str) -> tuple[int, list[str]]:
    """The exit status and the output of these steps, each a script."""
    (folder / "Makefile").write_text(MAKEFILE)
    for name, script in scripts.items():
        (folder / f"{name}.py").write_text(script)
    command = [sys.executable, str(ROOT / "tests/steps.py"), *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    return done.returncode, done.stdout.splitlines()


def test_a_step_that_fails_stops_no_other_and_the_failed_tests_are_the_last_lines(tmp_path):
    (tmp_path / "build").mkdir()
    names = "open('build/failed.txt', 'w').write('test_a.py::test_b: an error\\n'); raise SystemExit(1)"
    status, said = steps(tmp_path, "fails", "after", fails=names, after="print('here')")
    assert status == 1 and "here" in said
    assert [re.sub(r" +\d+ s ", "", line) for line in said[-3:]] == [
        "fails FAILED",
        "after passed",
        "FAILED test_a.py::test_b: an error",
    ]


def test_without_an_environment_nothing_goes_on(tmp_path):
    status, said = steps(tmp_path, "venv", "after", venv="raise SystemExit(1)", after="print('here')")
    assert status == 1 and "here" not in said


def test_steps_can_be_left_out(tmp_path):
    scripts = dict.fromkeys(("works", "fails", "after"), "")
    status, said = steps(tmp_path, *scripts, "--from", "fails", "--without", "after", **scripts)
    assert status == 0 and [line for line in said if line.startswith("== make")] == ["== make fails"]


def suite(folder: Path, **tests: str) -> tuple[int, str, str]:
    """The exit status of `tests/suite.py` over these modules, and what it wrote down as failed and as unstable."""
    for name, text in tests.items():
        (folder / f"test_{name}.py").write_text(FIRST + text)
    copy = folder / "tests/suite.py"
    copy.parent.mkdir()
    copy.write_text(SUITE.read_text())
    environment = {name: value for name, value in os.environ.items() if name != "PYTEST_ADDOPTS"}
    command = [sys.executable, str(copy), "-q", "-p", "no:cacheprovider", "--numprocesses", "2", str(folder)]
    status = subprocess.run(command, cwd=folder, env=environment, capture_output=True).returncode
    return status, *((folder / f"build/{name}.txt").read_text() for name in ("failed", "unstable"))


def test_what_fails_once_is_unstable_and_named_with_its_error(tmp_path):
    status, failed, unstable = suite(tmp_path, it=TESTS["once"], other="def test_other(): pass")
    assert (status, failed) == (0, "") and unstable == "test_it.py::test_it: AssertionError: a defect\n"


@pytest.mark.parametrize("kind", some([kind for kind in TESTS if kind != "once"]))
def test_whatever_else_goes_wrong_is_red(tmp_path, kind):
    status, failed, unstable = suite(tmp_path, it=TESTS[kind], other="def test_other(): pass")
    assert status == 1 and unstable == "" and failed.startswith("test_it.py")


def test_many_failures_are_no_chance(tmp_path):
    tests = {f"it_{number}": TESTS["once"].replace("first()", f"first('{number}')") for number in range(4)}
    status, failed, unstable = suite(tmp_path, **tests)
    assert status == 1 and unstable == "" and len(failed.splitlines()) == 4
