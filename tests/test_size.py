"""The core stays readable in an afternoon. What grows past these wants to be two rooms, not a larger number here."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
FILE_LINES = 500
FUNCTION_LINES = 60


def product_files() -> list[Path]:
    packages = [ROOT / "kvtier_core", *ROOT.glob("plugins/*/kvtier_*"), *ROOT.glob("examples/plugins/*/kvtier_*")]
    return sorted(file for package in packages for file in package.rglob("*.py"))


def functions(file: Path) -> Iterator[tuple[str, int, int]]:
    """Name, first line, and number of lines."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, node.lineno, node.end_lineno - node.lineno + 1


def test_no_file_is_long():
    lines = {file.relative_to(ROOT): len(file.read_text().splitlines()) for file in product_files()}
    assert lines
    long = [f"{file} has {count} lines of at most {FILE_LINES}" for file, count in lines.items() if count > FILE_LINES]
    assert not long, "\n".join(long)


def test_no_function_is_long():
    long = [
        f"{file.relative_to(ROOT)}:{line}: {name} has {count} lines of at most {FUNCTION_LINES}"
        for file in product_files()
        for name, line, count in functions(file)
        if count > FUNCTION_LINES
    ]
    assert not long, "\n".join(long)
