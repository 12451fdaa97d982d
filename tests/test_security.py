"""What no file of the product may do: run what it reads, listen to the network, tell a secret."""

from __future__ import annotations

import ast
import os
import traceback
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import ClassVar, Literal

import attrs
import pytest

import kvtier_cpu.plugin
import kvtier_disk.plugin
from kvtier_core.cli import main
from kvtier_core.config.load import load_config
from kvtier_core.config.open import open_stack
from kvtier_core.config.registry import Registry
from kvtier_core.errors import ConfigError
from kvtier_core.hookspecs import hookimpl
from kvtier_core.interfaces import BackendConfig
from kvtier_core.types import Nbytes, Seconds
from kvtier_testing.samples import make_context

ROOT = Path(__file__).parents[1]

# -- the sources ---------------------------------------------------------------------------------------

#: Bytes that these read become code.
EXECUTES = {"pickle", "_pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "code", "codeop"}
#: Nothing of ours listens but `LISTENERS`, and nothing connects but the parts of the tree in `CONNECTS`.
LISTENS = {"socket", "_socket", "socketserver", "asyncio", "http", "xmlrpc", "wsgiref", "ssl", "zmq", "select"}
LISTENS |= {"starlette", "uvicorn"}
OPERATORS = ROOT / "plugins/kvtier_serve/kvtier_serve/operators"
#: The endpoint of metrics, on loopback or a Unix socket unless an operator writes another address, and the socket of
#: `kvtier status`, which is never anything but a Unix socket; the sockets of `kvtier serve`, for engines and operators;
#: where a tier of peers shows frames, beyond loopback only to those who prove that they may; an example, on loopback.
LISTENERS = {
    ROOT / "plugins/kvtier_observers/kvtier_observers/endpoint.py": {"socket", "socketserver"},
    ROOT / "kvtier_core/telemetry/status_server.py": {"socket"},
    ROOT / "kvtier_core/storekit/owner_socket.py": {"socket"},
    ROOT / "plugins/kvtier_serve/kvtier_serve/server.py": {"socket"},
    OPERATORS / "listening.py": {"asyncio", "socket", "ssl", "starlette"},
    OPERATORS / "http.py": {"asyncio", "starlette"},
    OPERATORS / "clients.py": {"asyncio", "socket", "ssl", "starlette", "uvicorn"},
    OPERATORS / "access.py": {"socket", "starlette"},
    OPERATORS / "openapi.py": {"starlette"},
    ROOT / "plugins/kvtier_fleet/kvtier_fleet/http.py": {"asyncio", "starlette"},
    ROOT / "plugins/kvtier_peers/kvtier_peers/listener.py": {"socket"},
    ROOT / "examples/disaggregation_proxy.py": {"asyncio", "starlette", "uvicorn"},
}
#: What connects, and with what: tiers to the server of their url or the endpoint of their bucket, commands to engines.
CONNECTS = {"kvtier_redis": {"socket", "ssl", "select"}, "kvtier_s3": {"asyncio"}, "engines.py": {"socket"}}
#: Engines and operators to their server; a server to systemd.
CONNECTS |= {"kvtier_mooncake": {"socket"}}  # the process of Mooncake's client, and it to the master
CONNECTS |= {"kvtier_peers": {"socket", "ssl"}}
CONNECTS |= {"connection.py": {"socket", "select"}, "serve.py": {"socket"}, "asking.py": {"socket", "ssl", "http"}}
CONNECTS |= {"fleet.py": {"socket", "ssl"}}
#: By these it would wait for others to connect.
WAITS = {"bind", "listen", "accept", "create_server", "start_server", "start_unix_server", "create_datagram_endpoint"}
#: Its pipes and queues unpickle what comes through them; among the processes of a test that is no stranger's.
UNPICKLES = {"multiprocessing", "concurrent.futures.process"}
BUILTINS = {"eval", "exec", "compile", "__import__"}
#: Of these modules all but the safe ones resolve tags, or unpickle.
FORBIDDEN = {
    "yaml": {"load", "load_all", "full_load", "full_load_all", "unsafe_load", "unsafe_load_all"}
    | {f"{c}{kind}Loader" for c in ("", "C") for kind in ("", "Full", "Unsafe")},
    "torch": {"load"},
    "numpy": {"load"},
    "os": {"system", "popen"},
}


def dangers(
    source: str, *, test: bool = False, connects: Collection[str] = (), listens: Collection[str] = ()
) -> Iterator[tuple[int, str]]:
    """Line and name of whatever a file must not use."""
    tree = ast.parse(source)
    modules = EXECUTES if test else EXECUTES | UNPICKLES | LISTENS.difference(connects, listens)
    if connects:
        yield from ((node.lineno, node.attr) for node in ast.walk(tree) if getattr(node, "attr", "") in WAITS)
    for line, name in [*_imports(tree), *_used(tree)]:
        module, _, attribute = name.rpartition(".")
        if name in BUILTINS or attribute in FORBIDDEN.get(module, ()) or not modules.isdisjoint(_and_parents(name)):
            yield line, name


def _and_parents(name: str) -> Iterator[str]:
    while name:
        yield name
        name = name.rpartition(".")[0]


def _imports(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """The full names that are imported."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def _used(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Builtins, and the attributes of modules, whatever the file calls these."""
    aliases = [alias for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    modules = {alias.asname or alias.name: alias.name for alias in aliases}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id in BUILTINS:
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules:
            yield node.lineno, f"{modules[node.value.id]}.{node.attr}"


def sources() -> list[Path]:
    return sorted(file for room in ("kvtier_core", "plugins", "examples") for file in (ROOT / room).rglob("*.py"))


def is_test(file: Path) -> bool:
    return not {"tests", "kvtier_testing"}.isdisjoint(file.relative_to(ROOT).parts)


def connects(file: Path) -> Collection[str]:
    """The modules with which a file may connect."""
    parts = [] if is_test(file) or file in LISTENERS else file.relative_to(ROOT).parts
    return set().union(*(CONNECTS[part] for part in parts if part in CONNECTS))


@pytest.mark.parametrize(
    "source",
    ["sock.listen()", "socket.create_server(place)", "await asyncio.start_server(f)", "import http", "import asyncio"],
)
def test_a_tier_that_connects_may_not_listen(source):
    assert list(dangers(f"async def f():\n    {source}", connects={"socket"}))


def test_no_source_runs_what_it_reads_or_listens():
    found = [
        f"{file.relative_to(ROOT)}:{line}: {name}"
        for file in sources()
        for line, name in dangers(
            file.read_text(),
            test=is_test(file),
            connects=connects(file),
            listens=LISTENERS.get(file, ()),
        )
    ]
    assert not found, "\n".join(found)


def test_commands_are_accepted_on_a_unix_socket_alone():
    files = [ROOT / "kvtier_core/telemetry/status_server.py", ROOT / "kvtier_core/storekit/owner_socket.py"]
    files += [
        ROOT / "plugins/kvtier_serve/kvtier_serve/server.py",
        ROOT / "plugins/kvtier_remote/kvtier_remote/connection.py",
    ]
    families = [name for file in files for _, name in _used(ast.parse(file.read_text()))]
    assert {name for name in families if name.startswith("socket.AF_")} == {"socket.AF_UNIX"}


def test_the_sources_were_found():
    names = {file.name for file in sources()}
    assert {"yaml_nodes.py", "weights.py", "segment.py", "folder.py", "demo.py"} <= names
    assert 20 < sum(not is_test(file) for file in sources()) < len(sources())


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "import pickle as json",
        "from pickle import loads",
        "from marshal import loads as parse",
        "def f():\n    import shelve",
        "import dill, cloudpickle",
        "import multiprocessing.connection",
        "from multiprocessing import Queue",
        "import socket",
        "from http.server import HTTPServer",
        "import asyncio",
        "import yaml\nyaml.load(text, yaml.SafeLoader)",
        "import yaml as y\ny.load(text)",
        "import yaml\nclass Loader(yaml.FullLoader): pass",
        "from yaml import UnsafeLoader",
        "from yaml import load as read",
        "import yaml\nyaml.unsafe_load(text)",
        "import torch\nweights = torch.load(path)",
        "from torch import load",
        "import numpy as np\nnp.load(path)",
        "eval(text)",
        "run = exec",
        "__import__(name)",
        "import os\nos.system(text)",
    ],
)
def test_each_danger_is_seen(source):
    assert list(dangers(source))


@pytest.mark.parametrize(
    "source",
    [
        "import json\njson.loads(text)",
        "import yaml\nyaml.compose(text, yaml.BaseLoader)",
        "import yaml\nyaml.safe_load(text)",
        "import re\nre.compile(text)",
        "mover.load(1, [0], pages)",
        "socket = code = select(http)",
    ],
)
def test_harmless_calls_are_allowed(source):
    assert not list(dangers(source))


def test_a_test_may_have_processes_and_sockets():
    assert not list(dangers("import multiprocessing, socket", test=True))
    assert list(dangers("import pickle", test=True))


# -- the network ---------------------------------------------------------------------------------------


def sockets() -> set[str]:
    """Of this process, by their inodes."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            found.add(os.readlink(f"/proc/self/fd/{name}"))
        except FileNotFoundError:  # the descriptor that listed the folder
            continue
    return {target for target in found if target.startswith("socket:")}


def test_an_open_stack_has_no_socket(tmp_path):
    stack = {
        "version": 1,
        "tiers": [
            {"type": "cpu", "capacity": "16MiB"},
            {"type": "disk", "capacity": "16MiB", "path": str(tmp_path), "min_free": "0B"},
        ],
    }
    before = sockets()
    manager = open_stack(load_config(stack, Registry.of(kvtier_cpu.plugin, kvtier_disk.plugin)), make_context())
    try:
        assert sockets() <= before
    finally:
        manager.close()


# -- secrets -------------------------------------------------------------------------------------------

SECRET = "hunter2"


def _is_long(instance, attribute, value):
    if len(value) < 20:
        raise ValueError(f"{attribute.name} is too short: {value!r}")


@attrs.frozen
class VaultConfig(BackendConfig):
    """Fields of every type, all of them nobody's business."""

    type: ClassVar[str] = "vault"

    password: str = attrs.field(default="", repr=False)
    token: str = attrs.field(default="x" * 20, repr=False, validator=_is_long)
    pin: int = attrs.field(default=0, repr=False)
    share: float = attrs.field(default=0.0, repr=False)
    locked: bool = attrs.field(default=True, repr=False)
    mode: Literal["a", "b"] = attrs.field(default="a", repr=False)
    size: Nbytes = attrs.field(default=Nbytes(1), repr=False)
    wait: Seconds = attrs.field(default=Seconds(1), repr=False)
    file: Path = attrs.field(default=Path("/"), repr=False)
    words: tuple[str, ...] = attrs.field(default=(), repr=False)

    def open(self, ctx):
        raise NotImplementedError


@hookimpl
def kvtier_backends():
    """This module is the plugin."""
    return [VaultConfig]


class Vault:
    @hookimpl
    def kvtier_backends(self):
        return [VaultConfig]


REGISTRY = Registry.of(kvtier_cpu.plugin, Vault())


def stack_with(setting: str) -> str:
    tiers = f"  - {{type: cpu, capacity: 1GiB}}\n  - type: vault\n    capacity: 1GiB\n    {setting}\n"
    return f"version: 1\ntiers:\n{tiers}"


def test_a_secret_is_in_no_repr(tmp_path):
    file = tmp_path / "kvtier.yaml"
    file.write_text(stack_with(f"password: {SECRET}"))
    config = load_config(file, REGISTRY)
    assert config.tiers[1].config.password == SECRET
    assert SECRET not in f"{config!r} {config} {config.tiers[1].config!r}"


def test_check_hides_a_secret(tmp_path, monkeypatch, capsys):
    """With the plugin installed, as a user has it."""
    info = tmp_path / "kvtier_vault-0.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: kvtier-vault\nVersion: 0.1\n")
    (info / "entry_points.txt").write_text(f"[kvtier.v1]\nvault = {__name__}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    Path("kvtier.yaml").write_text(stack_with(f"password: {SECRET}"))
    assert main(["check", "kvtier.yaml"]) == 0
    told = capsys.readouterr()
    assert ["$.tiers[1].password", "(hidden)", "kvtier.yaml:6"] in [line.split() for line in told.out.splitlines()]
    assert SECRET not in told.out + told.err


@pytest.mark.parametrize(
    "setting",
    [
        f"password: [{SECRET}",  # not YAML
        f'password: "{SECRET}',
        f"password: {SECRET}: x",
        f"password: {SECRET}\n    password: {SECRET}x",
        f"password: !{SECRET} x",
        f"password: *{SECRET}",
        f"password: &{SECRET} x",
        f"password: [{SECRET}]",  # of another type
        f"password: {{{SECRET}: x}}",
        f"password: {{x: {SECRET}}}",
        f"passwrod: {SECRET}",
        f"token: {SECRET}",
        f"pin: {SECRET}",
        f"share: {SECRET}",
        f"locked: {SECRET}",
        f"mode: {SECRET}",
        f"size: {SECRET}",
        f"wait: {SECRET}",
        f"file: ~{SECRET}",
        f"words: {SECRET}",
        f"words: [[{SECRET}]]",
    ],
)
def test_a_secret_is_in_no_complaint(tmp_path, setting):
    """Neither in what the user is told nor in a traceback in a log."""
    file = tmp_path / "kvtier.yaml"
    file.write_text(stack_with(setting))
    with pytest.raises(ConfigError) as caught:
        load_config(file, REGISTRY)
    assert [problem.where for problem in caught.value.problems if problem.where.startswith(f"{file}:")]
    assert SECRET not in str(caught.value)
    assert SECRET not in "".join(traceback.format_exception(caught.value))


@pytest.mark.parametrize("field", ["password", "mode", "size", "wait", "file", "words", "locked"])
def test_a_secret_number_is_in_no_complaint(field):
    """Inline values come with types, and a password may look like a number."""
    stack = {
        "version": 1,
        "tiers": [{"type": "cpu", "capacity": "1GiB"}, {"type": "vault", "capacity": "1GiB", field: 31337}],
    }
    with pytest.raises(ConfigError) as caught:
        load_config(stack, REGISTRY)
    assert "31337" not in "".join(traceback.format_exception(caught.value))
