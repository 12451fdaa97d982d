"""Files are opened with an encoding of their own: that of the locale need not be UTF-8."""

from __future__ import annotations

import ast
import os
import subprocess
import sys

import pytest
from test_size import PRODUCT, ROOT


def names_no_encoding(call: ast.Call) -> bool:
    """Does the call open a text file in the encoding of the locale?"""
    called = getattr(call.func, "attr", None) or getattr(call.func, "id", "")
    if any(keyword.arg == "encoding" for keyword in call.keywords):
        return False
    if called in ("read_text", "write_text"):
        return len(call.args) < (1 if called == "read_text" else 2)
    if not (isinstance(call.func, ast.Name) and called == "open"):
        return False
    modes = [*call.args[1:2], *(keyword.value for keyword in call.keywords if keyword.arg == "mode")]
    return "b" not in (modes[0].value if modes else "r")


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("file.read_text()", True),
        ("file.read_text('utf-8')", False),
        ("file.write_text(words)", True),
        ("file.write_text(words, encoding='ascii')", False),
        ("open(file)", True),
        ("open(file, 'w')", True),
        ("open(file, mode='rb')", False),
        ("folder.open(name, flags)", False),
    ],
)
def test_calls_without_an_encoding_are_found(written, expected):
    assert names_no_encoding(ast.parse(written).body[0].value) == expected


def test_a_secret_is_the_same_in_every_locale():
    """A salt that a client sends in JSON is in UTF-8, and names chunks."""
    salt = "ein Sälzchen ☃"
    told = "from kvtier_core.types import EnvSecret; print(ascii(EnvSecret('SALT').value))"
    environment = {**os.environ, "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0", "SALT": salt}
    done = subprocess.run([sys.executable, "-c", told], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ascii(salt)


def test_no_file_is_opened_in_the_encoding_of_the_locale():
    unnamed = [
        f"{file.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)}"
        for file in PRODUCT
        for node in ast.walk(ast.parse(file.read_text("utf-8")))
        if isinstance(node, ast.Call) and names_no_encoding(node)
    ]
    assert not unnamed, "\n".join(unnamed)
