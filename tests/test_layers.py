"""Who may import whom: the house of docs/architecture.md, floor by floor, read from the sources."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CORE = "kvtier_core"

#: From the ground up: a file imports what is below it, and on its own floor.
FLOORS = [
    {"errors", "types", "_native", "native"},
    {"interfaces", "pages", "checksum", "files", "workers", "nodes"},
    {"frame", "copier"},
    {"batches", "mover", "cuda", "door", "breaker", "inquiries", "sightings", "tree", "residents", "memo"}
    | {"ceiling", "doomed", "hookspecs"},
    {"arena", "tier", "descent", "calls"},
    {"manager", "structure", "builtin", "stats"},
    {"plugins"},
    {"config"},
    {"vllm", "testing", "simulate"},
    {"cli"},
]
FLOOR_OF = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}

#: The data plane does not know that plugins exist.
DATA_PLANE = {"native", "pages", "checksum", "frame", "copier", "files", "workers", "batches", "mover", "cuda"}
DATA_PLANE |= {"ceiling", "doomed", "door", "breaker", "inquiries", "sightings", "tree", "residents", "memo"}
DATA_PLANE |= {"arena", "tier", "descent", "calls", "manager"}
PLUGIN_PLANE = {"hookspecs", "plugins", "structure", "nodes", "config", "builtin"}

#: What a plugin may use of the core. Its tests may also use `testing`.
FOR_PLUGINS = {"types", "interfaces", "errors", "hookspecs", "mover", "cuda", "files"}

#: What every environment with kvtier in it has.
LIGHT = {CORE, "attrs", "pluggy", "yaml", *sys.stdlib_module_names}

PACKAGES = sorted(
    init.parent for folder in ("plugins", "examples") for init in (ROOT / folder).glob("*/kvtier_*/__init__.py")
)


def imports(file: Path, *, at_module_level: bool = False) -> Iterator[tuple[str, int]]:
    """The full names that a file imports, and the lines."""
    tree = ast.parse(file.read_text())
    for node in _executed_on_import(tree) if at_module_level else ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{file}:{node.lineno}: a relative import"
            # `from kvtier_core import frame` imports the module kvtier_core.frame.
            names = [f"{node.module}.{alias.name}" for alias in node.names] if node.module == CORE else [node.module]
            yield from ((name, node.lineno) for name in names)


def _executed_on_import(node: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield child
            yield from _executed_on_import(child)


def rooms(file: Path) -> Iterator[tuple[str, str]]:
    """The rooms of the core that a file imports, and where."""
    for name, line in imports(file):
        if name.startswith(f"{CORE}."):
            yield name.split(".")[1], f"{file.relative_to(ROOT)}:{line}"


def core_files() -> list[tuple[str, Path]]:
    """Every file of the core but its `__init__`, and its room."""
    folder = ROOT / CORE
    files = sorted(file for file in folder.rglob("*.py") if file != folder / "__init__.py")
    return [(file.relative_to(folder).parts[0].removesuffix(".py"), file) for file in files]


def test_every_room_has_a_floor():
    assert {room for room, _ in core_files()} <= FLOOR_OF.keys(), "say in FLOORS where the new file belongs"


def test_nobody_imports_what_is_above():
    climbs = [
        f"{where}: {room} (floor {FLOOR_OF[room]}) imports {used} (floor {FLOOR_OF[used]})"
        for room, file in core_files()
        for used, where in rooms(file)
        if FLOOR_OF[used] > FLOOR_OF[room]
    ]
    assert not climbs, "\n".join(climbs)


def test_the_engines_edge_and_the_kit_do_not_know_each_other():
    crossings = [
        f"{where}: {room} imports {used}"
        for room, file in core_files()
        for used, where in rooms(file)
        if {room, used} == {"vllm", "testing"}
    ]
    assert not crossings, "\n".join(crossings)


def test_the_data_plane_does_not_know_that_plugins_exist():
    knows = [
        f"{where}: {room} imports {used}"
        for room, file in core_files()
        for used, where in rooms(file)
        if room in DATA_PLANE and used in PLUGIN_PLANE
    ]
    assert not knows, "\n".join(knows)


def test_builtin_uses_what_a_plugin_may_use_and_what_was_compiled():
    more = [
        f"{where}: imports {used}"
        for room, file in core_files()
        for used, where in rooms(file)
        if room == "builtin" and used not in FOR_PLUGINS | {"builtin", "native"}
    ]
    assert not more, "\n".join(more)


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.name)
def test_plugins_use_only_the_interfaces(package):
    more = [
        f"{where}: imports {CORE}.{used}"
        for file in sorted(package.rglob("*.py"))
        for used, where in rooms(file)
        if used not in FOR_PLUGINS
    ]
    assert not more, "\n".join(more)


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.name)
def test_configs_of_plugins_are_light(package):
    heavy = [
        f"{package.name}/{name}:{line}: imports {module}"
        for name in ("plugin.py", "config.py")
        if (package / name).exists()
        for module, line in imports(package / name, at_module_level=True)
        if module.split(".")[0] not in LIGHT | {package.name}
    ]
    assert not heavy, "\n".join(heavy)


def test_packages_were_found():
    assert {"kvtier_cpu", "kvtier_disk", "kvtier_minimal"} <= {package.name for package in PACKAGES}
