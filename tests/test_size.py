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
#: What must be read to know what becomes of a chunk.
DATA_PLANE = [
    f"{CORE}/{each}"
    for each in ["types.py", "layouts.py", "errors.py", "interfaces", "frames", "encoding", "stack", "work/io_pool.py"]
]
#: Lines of Python of a room or package, docstrings and blanks included: at most a tenth above what it had when it was
#: made. A commit that raises one says in its subject what that bought.
BUDGETS = {
    "builtin": 500,
    "cli": 360,
    "config": 2350,
    "encoding": 530,
    "engine": 3290,
    "frames": 620,
    "identity": 280,
    "interfaces": 1050,
    "policies": 500,
    "relays": 310,
    "stack": 5205,
    "storekit": 1630,
    "telemetry": 930,
    "transfer": 2550,
    "work": 240,
    "kvtier_blend": 1900,
    "kvtier_bundle": 880,
    "kvtier_cpu": 660,
    "kvtier_disk": 1470,
    "kvtier_doctor": 2470,
    "kvtier_fleet": 930,
    "kvtier_gds": 1400,
    "kvtier_hosts": 1330,
    "kvtier_lossy": 1000,
    "kvtier_mooncake": 710,
    "kvtier_observers": 690,
    "kvtier_peers": 1550,
    "kvtier_policies": 640,
    "kvtier_redis": 1880,
    "kvtier_remote": 1500,
    "kvtier_s3": 1530,
    "kvtier_serve": 5490,
    "kvtier_simulate": 1830,
    "kvtier_testing": 5150,
    "kvtier_vllm": 4750,
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
    file
    for pattern in (CORE, "plugins/*/kvtier_*", "plugins/kvtier_testing/examples/*/kvtier_*")
    for file in python_files(pattern)
]


def weight(*patterns: str) -> int:
    return sum(lines(file) for pattern in patterns for file in python_files(pattern))


def test_every_room_has_a_budget():
    rooms = {file.parent.name for file in ROOT.glob(f"{CORE}/*/__init__.py")}
    packages = {file.parent.name for file in ROOT.glob("plugins/*/kvtier_*/__init__.py")}
    assert rooms | packages == BUDGETS.keys()


@pytest.mark.parametrize("name", BUDGETS)
def test_a_room_keeps_its_budget(name):
    folder = f"plugins/{name}/{name}" if name.startswith("kvtier_") else f"{CORE}/{name}"
    assert weight(folder) <= BUDGETS[name]


def test_the_core_is_minimal():
    assert weight(CORE) <= 20520


def test_the_data_plane_is_read_in_an_afternoon():
    assert weight(*DATA_PLANE) <= 7975  # aim: 6600


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
