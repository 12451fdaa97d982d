"""docs/engines.md names every reason for which an engine is not served or a request is bypassed, and no other."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from source_copy import ROOT

DOCUMENT = (ROOT / "docs/engines.md").read_text()
TESTS = sorted(set(re.findall(r"`((?:tests|plugins)/[^`]+)`", DOCUMENT)))
#: The tables of what is not served: what, why, and the tests. What a reason tells of the engine at hand is "…".
REFUSED = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for section in DOCUMENT.split("\n## ")
    if "in the words of the log" in section
    for line in section.splitlines()
    if line.startswith("| ") and not line.startswith("| what |")
]
TOLD = {reason for _, why, _ in REFUSED for reason in re.findall(r"`([^`]+)`", why)}

#: Whatever is handed to one of these is a reason.
_REASONS = {"Bypass", "Refusal", "Refused", "Unidentified", "UnidentifiedError", "Unknown"}


def sentences(node: ast.AST | None) -> Iterator[str]:
    """The strings that an expression may be, with "…" for what is filled in; none without a word of its own."""
    match node:
        case ast.Constant(value=str(text)):
            found = text
        case ast.JoinedStr(values=parts):
            found = "".join(part.value if isinstance(part, ast.Constant) else "…" for part in parts)
        case ast.IfExp(body=body, orelse=other):
            yield from (*sentences(body), *sentences(other))
            return
        case _:
            return
    if re.search(r"\w", found):
        yield re.sub("…+", "…", found)


def reasons(file: Path) -> Iterator[str]:
    """The sentences with which this file refuses something."""
    for node in ast.walk(ast.parse(file.read_text())):
        match node:
            case ast.FunctionDef(returns=ast.Name(id="str")) if (ast.get_docstring(node) or "").startswith("Why "):
                for below in ast.walk(node):
                    if isinstance(below, ast.Return | ast.Assign):
                        yield from sentences(below.value)
            case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)) if name in _REASONS:
                for argument in node.args:
                    yield from sentences(argument)
            case ast.Call(func=ast.Name(id="WorkerReport")):
                for argument in node.args[3:]:
                    yield from sentences(argument)


FOLDERS = ("plugins/kvtier_vllm/kvtier_vllm", "kvtier_core/engine")
FILES = [file for each in FOLDERS for file in (ROOT / each).rglob("*.py") if file.name != "offloading.py"]
IN_THE_CODE = {reason for file in FILES for reason in reasons(file)}
STRINGS = {text for file in FILES for node in ast.walk(ast.parse(file.read_text())) for text in sentences(node)}


def test_every_row_has_a_reason_and_a_test():
    assert len(REFUSED) > 30
    assert [what for what, why, tests in REFUSED if "`" not in why or not re.search("`(tests|plugins)/", tests)] == []


def test_every_reason_of_the_code_is_in_the_document():
    assert not IN_THE_CODE - TOLD


def test_every_reason_of_the_document_is_in_the_code():
    assert not TOLD - STRINGS


@pytest.mark.parametrize("what, why, tests", REFUSED, ids=[what[:40] for what, *_ in REFUSED])
def test_a_test_it_names_has_seen_the_reason(what, why, tests):
    """Or the longest piece of it that is the same for every engine."""
    files = [ROOT / test for test in re.findall(r"`((?:tests|plugins)/[^`]+)`", tests)]
    seen = [text for file in files for node in ast.walk(ast.parse(file.read_text())) for text in sentences(node)]
    pieces = {max(reason.split("…"), key=len).strip(" ;:,.") for reason in re.findall(r"`([^`]+)`", why)}
    assert not {piece for piece in pieces if not any(piece in text for text in seen)}


@pytest.mark.parametrize("test", TESTS)
def test_the_tests_it_names_exist(test):
    assert (ROOT / test).is_file()
