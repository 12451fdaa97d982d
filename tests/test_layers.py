"""A package imports only what stands above it in a list. Read from the sources."""

from __future__ import annotations

import ast
import functools
import graphlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CORE = "kvtier_core"

#: From the ground up: each imports only what stands above it in this list.
FLOORS = [
    "forks errors outside native _native",
    "work",
    "types",
    "packed_form",
    "layouts",
    "interfaces",
    "frames",
    "hookspecs",
    "policies",
    "storekit",
    "transfer",
    "identity",
    "telemetry",
    "encoding",
    "relays",
    "stack",
    "builtin",
    "config",
    "engine",
    "cli",
]
#: What a plugin may use of the core. Its tests may also use `testing`.
FOR_PLUGINS = {"types", "layouts", "interfaces", "errors", "outside", "hookspecs", "transfer", "storekit", "work"}
#: Packages beside the core that are released with it, and may use all of it.
PRODUCTS = {
    "kvtier_blend",
    "kvtier_bundle",
    "kvtier_doctor",
    "kvtier_fleet",
    "kvtier_hosts",
    "kvtier_observers",
    "kvtier_policies",
    "kvtier_remote",
    "kvtier_serve",
    "kvtier_simulate",
    "kvtier_testing",
    "kvtier_vllm",
}
#: Nothing of the core needs these, until a tier, an engine or a codec does.
HEAVY = {"torch", "numpy", "vllm", "transformers", "boto3", "redis", "mooncake"}
#: What every environment with kvtier in it has.
LIGHT = {CORE, "attrs", "packaging", "pluggy", "yaml", *sys.stdlib_module_names}

FLOOR_OF = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms.split()}
PACKAGES = sorted(
    init.parent
    for folder in ("plugins", "plugins/kvtier_testing/examples")
    for init in (ROOT / folder).glob("*/kvtier_*/__init__.py")
)


def modules_of(package: Path) -> dict[str, Path]:
    """The files of a package by the full names of their modules."""
    return {
        ".".join(file.relative_to(package.parent).with_suffix("").parts).removesuffix(".__init__"): file
        for file in sorted(package.rglob("*.py"))
    }


MODULES = modules_of(ROOT / CORE)
ALL_MODULES = MODULES | {name: file for package in PACKAGES for name, file in modules_of(package).items()}


@functools.cache
def imports(file: Path, *, at_module_level: bool = False) -> list[tuple[str, int]]:
    """The full names that a file imports, inside functions too, and the lines."""
    tree = ast.parse(file.read_text())
    found = []
    for node in _executed_on_import(tree) if at_module_level else ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{file}:{node.lineno}: a relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            found += [(name if name in ALL_MODULES else node.module, node.lineno) for name in names]
    return found


def _executed_on_import(node: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield child
            yield from _executed_on_import(child)


def rooms(file: Path) -> Iterator[tuple[str, str]]:
    """What a file imports of the core: the first name below `kvtier_core`, and where."""
    for name, line in imports(file):
        if name.startswith(f"{CORE}."):
            yield name.split(".")[1], f"{file.relative_to(ROOT)}:{line}: imports {name}"


def test_no_import_goes_up():
    inside = {module: file for module, file in MODULES.items() if module != CORE}
    assert {module.split(".")[1] for module in inside} <= FLOOR_OF.keys(), "say in FLOORS where the new package belongs"
    up = [
        where
        for module, file in inside.items()
        for room, where in rooms(file)
        if FLOOR_OF[room] > FLOOR_OF[module.split(".")[1]]
    ]
    assert not up, "\n".join(up)


def test_the_architecture_shows_the_same_list():
    page = (ROOT / "docs/architecture.md").read_text()
    (core,) = re.findall(r"```\nkvtier_core/\n(.*?)^csrc/", page, re.DOTALL | re.MULTILINE)
    names = re.findall(r"^  ((?:[a-z_]+(?:/|\.py) ?)+)", core, re.MULTILINE)
    shown = [name.rstrip("/").removesuffix(".py") for line in names for name in line.split()]
    assert shown == [name for line in FLOORS for name in line.split() if name != "_native"]


def test_no_import_goes_round():
    """Imports inside functions count, and so do the plugins' packages."""
    graph = {module: {name for name, _ in imports(file) if name in ALL_MODULES} for module, file in ALL_MODULES.items()}
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError, which names the circle


def test_the_core_imports_no_package_beside_it():
    """Those are found by their entry points."""
    beside = {package.name for package in PACKAGES}
    assert not [where for package in beside for where in importers(package) if where.startswith(f"{CORE}/")]


def importers(library: str, *but: str) -> list[str]:
    """Where a library is imported, except in these packages or modules."""
    return [
        f"{file.relative_to(ROOT)}:{line}: imports {name}"
        for module, file in ALL_MODULES.items()
        if not f"{module}.".startswith(tuple(f"{each}." for each in but))
        for name, line in imports(file)
        if name.split(".")[0] == library
    ]


def test_only_the_connectors_know_vllm():
    assert not importers("vllm", "kvtier_vllm", "kvtier_blend")


def test_only_its_adapter_knows_lmcache():
    assert not importers("lmcache", "kvtier_hosts.lmcache")


def test_only_the_backend_of_its_cache_knows_sglang():
    assert not importers("sglang", "kvtier_hosts.hicache")


def test_an_engine_is_served_without_torch_but_for_the_pages_themselves():
    """The self-test and audits use the engine's tensors, and the worker side names their type."""
    pages = tuple(f"{CORE}.engine.worker.{name}" for name in ("self_test", "audit", "side"))
    assert not [where for where in importers("torch", *pages) if where.startswith(f"{CORE}/engine/")]


@pytest.mark.parametrize("heavy", [("vllm",), ("vllm", "torch")], ids=" or ".join)
def test_the_engine_package_loads_no_engine(heavy):
    """In one process for all modules that may load as little; the first one that loads more is named."""
    pages = (".worker", ".worker.self_test", ".worker.audit", ".worker.side")
    ours = [
        name for name in MODULES if name.startswith(f"{CORE}.engine") and ("torch" not in heavy) == name.endswith(pages)
    ]
    script = f"""
import importlib, sys
for name in {ours}:
    importlib.import_module(name)
    assert not {set(heavy)} & set(sys.modules), name
"""
    assert ours
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert not done.returncode, done.stderr


@pytest.mark.parametrize("module", ["errors", "types", "interfaces", "hookspecs"])
def test_the_ground_floor_loads_nothing_above_it(module: str):
    script = f"import sys, kvtier_core.{module}; print(*[name for name in sys.modules if name.startswith('{CORE}.')])"
    loaded = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.split()
    assert max(FLOOR_OF[name.split(".")[1]] for name in loaded) == FLOOR_OF[module], loaded


@pytest.mark.parametrize("module", [CORE, f"{CORE}.config.open", f"{CORE}.cli", "kvtier_vllm"])
def test_importing_the_core_is_light(module: str):
    script = f"import sys, {module}; print(*({HEAVY!r} & sys.modules.keys()))"
    loaded = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.split()
    assert not loaded


@pytest.mark.parametrize(
    "package", [each for each in PACKAGES if each.name not in PRODUCTS], ids=lambda package: package.name
)
def test_plugins_use_only_the_interfaces(package: Path):
    more = [where for file in sorted(package.rglob("*.py")) for used, where in rooms(file) if used not in FOR_PLUGINS]
    assert not more, "\n".join(more)


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.name)
def test_configs_of_plugins_are_light(package: Path):
    heavy = [
        f"{package.name}/{name}:{line}: imports {module}"
        for name in ("plugin.py", "config.py")
        if (package / name).exists()
        for module, line in imports(package / name, at_module_level=True)
        if module.split(".")[0] not in LIGHT | {package.name}
    ]
    assert not heavy, "\n".join(heavy)


def test_packages_were_found():
    ours = {
        "kvtier_blend",
        "kvtier_bundle",
        "kvtier_cpu",
        "kvtier_disk",
        "kvtier_doctor",
        "kvtier_fleet",
        "kvtier_gds",
        "kvtier_hosts",
        "kvtier_lossy",
        "kvtier_mooncake",
        "kvtier_observers",
        "kvtier_peers",
        "kvtier_policies",
        "kvtier_redis",
        "kvtier_remote",
        "kvtier_s3",
        "kvtier_serve",
        "kvtier_simulate",
        "kvtier_testing",
        "kvtier_vllm",
    }
    assert ours <= {package.name for package in PACKAGES}


def test_editors_see_the_public_names():
    """What type checkers read and what is imported when a name is used are the same."""
    import kvtier_core

    told = {name for name, _ in imports(MODULES[CORE]) if name.startswith(f"{CORE}.")}
    assert told == {f"{CORE}.{home}" for home in kvtier_core._HOMES.values()}
    tree = ast.parse(MODULES[CORE].read_text())
    of_ours = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module.startswith(CORE)]
    listed = {alias.name: node.module for node in of_ours for alias in node.names}
    assert listed == {name: f"{CORE}.{home}" for name, home in kvtier_core._HOMES.items()}
    assert all(getattr(kvtier_core, name) for name in kvtier_core.__all__)
