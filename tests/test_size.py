"""The data plane stays readable in an afternoon. A budget is raised only in a commit that says why."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILE_LINES = 500
FUNCTION_LINES = 60

CORE = "kvtier_core"
#: Packages and files, and the lines of Python that all of them may have, docstrings and blanks included.
BUDGETS = {
    "data plane": (
        7394,  # aim: 5700
        [f"{CORE}/{each}" for each in ("types.py", "layouts.py", "errors.py", "interfaces", "frames", "stack")]
        + [f"{CORE}/transfer/io_pool.py"],
    ),
    "server": (3506, [f"{CORE}/server"]),
    "core": (36765, [CORE]),  # aim: 25500, without the server
    "testing kit": (4563, [f"{CORE}/testing"]),
    "plugins": (9016, ["plugins/*/kvtier_*"]),
}


def python_files(pattern: str) -> list[Path]:
    found = sorted(ROOT.glob(pattern))
    assert found, pattern
    return [file for path in found for file in ([path] if path.is_file() else sorted(path.rglob("*.py")))]


def lines(file: Path) -> int:
    return len(file.read_text().splitlines())


def functions(file: Path) -> Iterator[tuple[str, int, int]]:
    """Name, first line, and number of lines."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, node.lineno, node.end_lineno - node.lineno + 1


PRODUCT = [
    file for pattern in (CORE, "plugins/*/kvtier_*", "examples/plugins/*/kvtier_*") for file in python_files(pattern)
]


@pytest.mark.parametrize("name", BUDGETS)
def test_a_package_keeps_its_budget(name):
    budget, patterns = BUDGETS[name]
    assert sum(lines(file) for pattern in patterns for file in python_files(pattern)) <= budget


def test_no_file_is_long():
    long = [f"{file.relative_to(ROOT)}: {lines(file)} lines" for file in PRODUCT if lines(file) > FILE_LINES]
    assert not long, "\n".join(long)


def test_no_function_is_long():
    long = [
        f"{file.relative_to(ROOT)}:{line}: {name} has {count} lines of at most {FUNCTION_LINES}"
        for file in PRODUCT
        for name, line, count in functions(file)
        if count > FUNCTION_LINES
    ]
    assert not long, "\n".join(long)
