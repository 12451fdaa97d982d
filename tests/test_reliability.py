"""docs/reliability.md is true as far as a machine can tell: its tests and mutants exist, and no mutant is stale."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

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


@functools.cache
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


def test_the_tests_it_names_exist():
    assert [test for test in TESTS if not stands(test)] == []


def test_the_document_names_all_mutants():
    assert {mutant.name for mutant in MUTANTS} == NAMED
    assert len(MUTANTS) == len(NAMED)


def test_every_mutant_can_be_planted():
    """`make mutants` sees them die; here is only seen that the code they change is still there."""
    texts = {file: (ROOT / file).read_text() for file in {mutant.file for mutant in MUTANTS}}
    assert [mutant.name for mutant in MUTANTS if texts[mutant.file].count(mutant.code) != 1] == []
    assert [mutant.name for mutant in MUTANTS if mutant.code == mutant.instead or not stands(mutant.test)] == []
