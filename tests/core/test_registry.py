"""The registry, with plugins that are really installed: dist-info and modules in a folder on the path."""

from __future__ import annotations

import logging
import subprocess
import sys
import textwrap

import pytest

from kvtier_core.config.decode import Unavailable
from kvtier_core.config.registry import Registry
from kvtier_core.hookspecs import hookimpl
from kvtier_core.policies.lru import LruConfig
from kvtier_core.types import Event, EventKind

HEAD = """
import attrs
from typing import ClassVar
from kvtier_core.hookspecs import hookimpl
from kvtier_core.interfaces import BackendConfig, EvictionConfig

class Offered(BackendConfig):
    def open(self, ctx): ...
"""

POLICIES = ("arc", "fifo", "gittins", "lfu", "lru", "lru2", "mru", "s3fifo", "tournament")


def backend(fields, name="disk"):
    """The source of a plugin that offers one backend."""
    return (
        HEAD
        + f"""
@attrs.frozen
class MineConfig(Offered):
    type: ClassVar[str] = {name!r}
    {fields}

@hookimpl
def kvtier_backends():
    return [MineConfig]
"""
    )


@pytest.fixture
def install(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    modules: list[str] = []

    def install(dist, entry, source, version="1.0"):
        module = f"{dist}_{entry}".replace("-", "_")
        (tmp_path / f"{module}.py").write_text(textwrap.dedent(source))
        info = tmp_path / f"{dist.replace('-', '_')}-{version}.dist-info"
        info.mkdir(exist_ok=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {dist}\nVersion: {version}\n")
        entries = info / "entry_points.txt"
        before = entries.read_text() if entries.exists() else "[kvtier.v1]\n"
        entries.write_text(f"{before}{entry} = {module}\n")
        modules.append(module)

    yield install
    for module in modules:
        sys.modules.pop(module, None)


def installed_by(registry, plugin):
    return [(offer.kind, offer.name, offer.version) for offer in registry.offers() if offer.plugin == plugin]


def test_the_core_offers_what_it_ships_through_the_same_door():
    registry = Registry.of()
    assert [(offer.kind, offer.name) for offer in registry.offers()] == [
        ("backend", "heap"),
        *(("eviction policy", name) for name in POLICIES),
        ("serializer", "raw"),
        ("token database", "chained"),
    ]
    assert {offer.plugin for offer in registry.offers()} == {"kvtier:builtin"}
    assert registry.choose("eviction policy", "lru") is LruConfig
    assert registry.broken == registry.clashes() == []


def test_installed_plugins_are_found(install):
    install("acme-tiers", "fast", backend("size: int = 1", "fast"), "2.5")
    registry = Registry.discover()
    assert installed_by(registry, "acme-tiers:fast") == [("backend", "fast", "2.5")]
    assert registry.choose("backend", "fast").__name__ == "MineConfig"


def test_nothing_heavy_is_imported():
    source = """
        import sys
        import kvtier_core.cli
        from kvtier_core.config.registry import Registry
        from kvtier_core.config.model import load_config
        load_config({"version": 1, "tiers": [{"type": "heap", "capacity": "1GiB"}]}, Registry.of())
        print(sorted({"torch", "numpy", "vllm", "boto3", "redis"} & sys.modules.keys()))
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(source)], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


BROKEN = {
    "import boto33": "ModuleNotFoundError: No module named 'boto33'",
    "def oops(:": "SyntaxError: invalid syntax (bad_mine.py, line 1)",
    HEAD + "@hookimpl\ndef kvtier_backend(): return []": (
        "PluginValidationError: unknown hook 'kvtier_backend' in plugin <module 'bad_mine' from '{path}/bad_mine.py'>"
    ),
    HEAD + "@hookimpl\ndef kvtier_backends(config): return []": (
        "PluginValidationError: Plugin 'bad:mine' for hook 'kvtier_backends' hookimpl definition: "
        "kvtier_backends(config) Argument(s) {{'config'}} are declared in the hookimpl "
        "but can not be found in the hookspec"
    ),
    HEAD + "@hookimpl\ndef kvtier_backends(): return [7]": (
        "kvtier_backends offers 7, which is no ArenaConfig or BackendConfig class"
    ),
    HEAD + "@hookimpl\ndef kvtier_eviction_policies(): return [Offered]": (
        "kvtier_eviction_policies offers <class 'bad_mine.Offered'>, which is no EvictionConfig class"
    ),
    HEAD + "@hookimpl\ndef kvtier_backends(): return [BackendConfig]": (
        "BackendConfig is abstract, or not an attrs class of its own"
    ),
    HEAD + "@hookimpl\ndef kvtier_backends(): return [Offered]": (
        "Offered is abstract, or not an attrs class of its own"
    ),
    backend("", ""): "MineConfig does not name itself in 'type'",
    backend("threads: int = 3"): "MineConfig has a field 'threads', a key of the core's own",
    backend("ratio: complex = 3"): "no setting can have the type <class 'complex'>",
    backend("ratio: Unheard = 3"): "NameError: name 'Unheard' is not defined",
    backend("").replace("[MineConfig]", "[MineConfig, MineConfig]"): "offers backend 'disk' twice",
}


@pytest.mark.parametrize("source", BROKEN, ids=range(len(BROKEN)))
def test_a_broken_plugin_is_kept_with_its_reason_and_hides_no_other(install, tmp_path, source):
    why = BROKEN[source].format(path=tmp_path)
    install("bad", "mine", source)
    install("good", "mine", backend("", "good"))
    registry = Registry.discover()
    assert [str(broken) for broken in registry.broken if broken.plugin == "bad:mine"] == [f"bad:mine 1.0: {why}"]
    assert installed_by(registry, "good:mine") == [("backend", "good", "1.0")]
    assert installed_by(registry, "bad:mine") == []


def test_who_asks_for_a_broken_plugin_is_told_why(install):
    install("kvtier-s99", "s99", "import boto33", "0.4.1")
    assert Registry.discover().choose("backend", "s99") == Unavailable(
        "backend 's99' may be installed, but a plugin is broken: "
        "kvtier-s99:s99 0.4.1: ModuleNotFoundError: No module named 'boto33'"
    )


def test_two_plugins_with_one_name_are_told_to_whoever_asks_for_it(install):
    install("b-tiers", "x", backend("", "same"))
    install("a-tiers", "x", backend("", "same"))
    install("a-tiers", "y", backend("", "other"))
    registry = Registry.discover()
    clash = "backend 'same' is offered by a-tiers:x and by b-tiers:x"
    assert registry.choose("backend", "same") == Unavailable(clash, "uninstall all but one")
    assert registry.choose("backend", "other").type == "other"
    assert registry.clashes() == [clash]


def test_names_that_nobody_offers():
    registry = Registry.of()
    assert registry.choose("backend", "s3") == Unavailable(
        "no backend 's3' is installed (have: heap)", "pip install 'kvtier[s3]'"
    )
    assert registry.choose("eviction policy", "s3") == Unavailable(
        "no eviction policy 's3' is installed (have: arc, fifo, gittins, lfu, lru, lru2, mru, s3fifo, tournament)"
    )
    assert registry.choose("backend", "haep") == Unavailable(
        "no backend 'haep' is installed (have: heap)", "did you mean 'heap'?"
    )


class Observer:
    def __init__(self, fails):
        self.fails = fails
        self.seen = []

    @hookimpl
    def kvtier_observe(self, events):
        self.seen.append(events)
        if self.fails:
            raise RuntimeError("no")


def test_an_observer_that_raises_is_dropped_and_no_other(caplog):
    good, bad = Observer(fails=False), Observer(fails=True)
    registry = Registry.of(bad, good)
    events = [Event(EventKind.STORED, "cpu")]
    with caplog.at_level(logging.ERROR):
        registry.observe(events)
        registry.observe(events)
    assert good.seen == [events, events]
    assert bad.seen == [events]
    assert [record.getMessage() for record in caplog.records] == [
        "Observer: kvtier_observe raised and is not called again"
    ]
