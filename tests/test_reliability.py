"""docs/reliability.md is true as far as a machine can tell: its tests and mutants exist, and no mutant is stale."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from protections import MUTANTS
from source_copy import ROOT

DOCUMENT = (ROOT / "docs/reliability.md").read_text()
#: Promise, tests, mutants.
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in DOCUMENT.splitlines()
    if (line.startswith("| ") and "`tests/" in line) or (line.startswith("| ") and "`plugins/" in line)
]
TESTS = sorted({test for _, tests, _ in ROWS for test in re.findall(r"`([^`]+)`", tests)})
NAMED = {mutant for *_, mutants in ROWS for mutant in re.findall(r"`([^`]+)`", mutants)}


def functions(file: Path) -> set[str]:
    """But for tests that `make test` leaves to `make test-more`."""
    found = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.FunctionDef)]
    return {node.name for node in found if "pytest.mark.more" not in map(ast.unparse, node.decorator_list)}


def stands(test: str) -> bool:
    """Is there such a file, and in it such a test?"""
    file, _, name = test.partition("::")
    return (ROOT / file).is_file() and (not name or name.partition("[")[0] in functions(ROOT / file))


def test_every_promise_has_a_test_and_a_mutant():
    assert len(ROWS) > 20
    assert [promise for promise, tests, mutants in ROWS if "`" not in tests or "`" not in mutants] == []


@pytest.mark.parametrize("test", TESTS)
def test_the_tests_it_names_exist(test):
    assert stands(test)


def test_the_document_names_all_mutants():
    assert {mutant.name for mutant in MUTANTS} == NAMED
    assert len(MUTANTS) == len(NAMED)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_can_be_planted(mutant):
    """`make mutants` sees them die; here is only seen that the code they change is still there."""
    assert (ROOT / mutant.file).read_text().count(mutant.code) == 1
    assert mutant.code != mutant.instead
    assert stands(mutant.test)
