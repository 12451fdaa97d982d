"""The output of a run ends with why tests were skipped, how to get what they lack, and how many did not run."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = """
import sys
import pytest
from needs import needs

@pytest.mark.parametrize("number", range(3))
def test_with_a_program(number):
    needs("redis-server", None)

def test_elsewhere():
    needs("redis-server", None)

@pytest.mark.skipif(True, reason="no GPU here")
def test_on_a_gpu():
    pass

def test_with_what_is_there():
    needs("python", sys.executable)
"""
WITH_A_HOST = 'import pytest\npytest.importorskip("no_such_host", reason="make test-hosts")'


def said(folder: Path, *options: str, **settings: str) -> str:
    """The output of a run of these tests."""
    (folder / "test_some.py").write_text(TESTS)
    (folder / "test_hosts.py").write_text(WITH_A_HOST)
    environment = {name: value for name, value in os.environ.items() if name not in ("KVTIER_CI", "PYTEST_ADDOPTS")}
    environment |= {"PYTHONPATH": str(Path(__file__).parent), **settings}
    command = [sys.executable, "-m", "pytest", "-p", "summary", "-p", "no:cacheprovider", *options]
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment).stdout


@pytest.mark.parametrize("options", [(), ("--numprocesses", "2")], ids=["one process", "two"])
def test_each_reason_is_listed_once(tmp_path, options):
    listed = said(tmp_path, *options).partition(" skipped =")[2].splitlines()[1:-1]
    assert listed == [
        "    1  make test-hosts",
        "    1  no GPU here",
        "    4  redis-server is not installed: make programs",
    ]


def test_where_nothing_may_be_skipped_tests_fail_for_what_is_missing(tmp_path):
    output = said(tmp_path, KVTIER_CI="1")
    assert "redis-server is not installed: make programs" in output
    assert "4 failed, 1 passed" in output


def test_a_test_that_ends_its_process_costs_itself_alone(tmp_path):
    (tmp_path / "test_ends.py").write_text("import os\ndef test_ends():\n    os._exit(1)")
    output = said(tmp_path, "--numprocesses", "1", "test_ends.py", "test_some.py")
    assert "1 failed, 1 passed, 5 skipped" in output and "did not run" not in output


def test_tests_that_did_not_run_are_counted(tmp_path):
    (tmp_path / "test_fails.py").write_text("def test_fails():\n    assert False")
    assert "6 of 7 tests did not run" in said(tmp_path, "--exitfirst", "test_fails.py", "test_some.py")
