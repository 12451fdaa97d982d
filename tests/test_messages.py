"""Every sentence that an operator may read, in `tests/messages.txt`: a change of wording is seen in its diff.

`python tests/test_messages.py` writes the file anew.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
LIST = ROOT / "tests/messages.txt"
#: The conformance kit speaks to authors of plugins, in assertions of its own.
FILES = sorted(
    file
    for package in (ROOT / "kvtier_core", *ROOT.glob("plugins/*/kvtier_*"))
    for file in package.rglob("*.py")
    if "laws" not in file.relative_to(ROOT).parts
)

#: Where nobody may read log lines as data.
ROOMS = ("kvtier_core", "plugins", "tests", "benchmarks", "examples", "docs/building")

#: What is handed to one of these, an operator reads: problems, errors, refusals, reasons, advice.
SPEAKERS = {
    *("Problem", "problem", "wrong", "_wrong", "failed", "Unavailable", "BackendError", "StoreFull", "Gone", "NoFile"),
    *(
        "NotOurs",
        "Unanswered",
        "_Held",
        "ConfigError",
        "KvtierError",
        "ValueError",
        "Bypass",
        "Refusal",
        "Refused",
        "Unknown",
    ),
    *("Unidentified", "UnidentifiedError", "Broken", "Diagnosis", "Fact", "warn", "ContractError", "Missing"),
}
LEVELS = {"debug", "info", "warning", "error", "exception"}
LOGS = {"logger", "log", "_LOG", "_log"}
#: Variables that hold a part of such a sentence before it is said.
PARTS = {"why", "hint", "advice", "reason", "way_out", "ways_out"}


def text_of(node: ast.AST | None) -> Iterator[str]:
    """The texts that an expression may be; what is filled in is "…"."""
    match node:
        case ast.Constant(value=str(text)):
            yield re.sub(r"%[sdr]|%\.\df|%g", "…", text)
        case ast.JoinedStr(values=parts):
            yield "".join(part.value if isinstance(part, ast.Constant) else "…" for part in parts)
        case ast.IfExp(body=body, orelse=other):
            yield from (*text_of(body), *text_of(other))
        case ast.BoolOp(values=values):
            yield from (text for value in values for text in text_of(value))
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            yield from (*text_of(left), *text_of(right))


def is_sentence(text: str) -> bool:
    """Has it two words of its own? A path, a key or a unit alone is none."""
    return len(re.findall(r"[A-Za-z']{2,}", text.replace("…", " "))) > 1 and " " in text.strip()


def messages(file: Path) -> Iterator[tuple[str, str]]:
    """How each sentence is said, and its text."""
    for node in ast.walk(ast.parse(file.read_text())):
        said, values = "", []
        match node:
            case ast.Call(
                func=ast.Attribute(value=ast.Name(id=log) | ast.Attribute(attr=log), attr=level), args=args
            ) if log in LOGS and (level in LEVELS or level == "log"):
                said, values = f"log {level}", args[1:2] if level == "log" else args[:1]
            case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)) if name in SPEAKERS:
                said, values = name.strip("_"), [*node.args, *(keyword.value for keyword in node.keywords)]
            case ast.Call(func=ast.Attribute(attr="report"), keywords=keywords):
                said, values = "event", [keyword.value for keyword in keywords if keyword.arg == "why"]
            case ast.Assign(targets=[ast.Name(id=name)], value=value) if name in PARTS:
                said, values = name, [value]
            case ast.FunctionDef(name=name, returns=ast.Name(id="str")) if name == "__str__" or (
                ast.get_docstring(node) or ""
            ).startswith(("Why ", "How ")):
                said = "reason"
                values = [each.value for each in ast.walk(node) if isinstance(each, ast.Return)]
        spoken = [[" ".join(text.split()) for text in text_of(value) if is_sentence(text)] for value in values]
        if said in ("Problem", "problem", "wrong") and sum(map(bool, spoken)) > 1:  # why, and the way out
            spoken = [["; ".join(texts[0] for texts in spoken if texts)]]
        yield from ((said, text) for texts in spoken for text in texts)


def listing() -> str:
    """The whole list, by file."""
    lines = []
    for file in FILES:
        found = sorted(set(messages(file)))
        if found:
            lines += ["", str(file.relative_to(ROOT)), *(f"  {said}: {text}" for said, text in found)]
    return "\n".join(lines).lstrip() + "\n"


def test_the_list_has_every_sentence_and_no_other():
    assert listing() == LIST.read_text(), "look at each change, then run: python tests/test_messages.py"


#: What takes a hit line apart. `kvtier explain --json` has the same as data, and an observer has the events.
CUTS_A_HIT_LINE = re.compile(
    r"\b(split|partition|rpartition|match|fullmatch|search|sub|findall|finditer|compile)"
    r"\([^)]*\b(from kvtier|computed \(|waited )"
)


def test_no_code_cuts_the_hit_lines_of_the_log():
    files = [file for room in ROOMS for file in (ROOT / room).rglob("*.py") if "build" not in file.parts]
    assert len(files) > 300
    cut = [
        (str(file), line) for file in files for line in file.read_text().splitlines() if CUTS_A_HIT_LINE.search(line)
    ]
    assert cut == []


def test_each_message_is_logged_in_one_place():
    logged = Counter(text for file in FILES for said, text in messages(file) if said.startswith("log "))
    assert len(logged) > 25
    assert [text for text, places in logged.items() if places > 1] == []


def test_sentences_are_whole():
    """No full stop at the end of what is put into another line, no shouting, nothing that asks for a bug report."""
    said = {text for file in FILES for how, text in messages(file) if not how.startswith("log ")}
    assert [text for text in said if text.endswith((".", "!", " ")) or re.search(r"(?i)please|oops|sorry", text)] == []


if __name__ == "__main__":
    LIST.write_text(listing())
