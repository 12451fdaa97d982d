"""The registry, with plugins that are really installed: dist-info and modules in a folder on the path."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from importlib import metadata

import pytest

from kvtier_core.cli import main
from kvtier_core.config import registry
from kvtier_core.config.decode import Unavailable
from kvtier_core.config.load import load_config
from kvtier_core.config.registry import Registry
from kvtier_core.policies.gittins import GittinsConfig
from kvtier_core.policies.lru import LruConfig
from kvtier_lossy import plugin as lossy
from kvtier_observers import plugin as observers
from kvtier_policies import plugin as policies
from kvtier_simulate import plugin as simulate

HEAD = """
import attrs
from typing import ClassVar
from kvtier_core.hookspecs import hookimpl
from kvtier_core.interfaces import BackendConfig, EvictionConfig

class Offered(BackendConfig):
    def open(self, ctx): ...
"""


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
        ("eviction policy", "gittins"),
        ("eviction policy", "lru"),
        ("serializer", "packed"),
        ("serializer", "raw"),
        ("serializer", "zstd"),
        ("tier", "heap"),
        ("token database", "chained"),
    ]
    assert {offer.plugin for offer in registry.offers()} == {"kvtier:builtin"}
    assert registry.choose("eviction policy", "lru") is LruConfig
    assert registry.broken == registry.clashes() == []


def test_installed_plugins_are_found(install):
    install("acme-tiers", "fast", backend("size: int = 1", "fast"), "2.5")
    registry = Registry.discover()
    assert installed_by(registry, "acme-tiers:fast") == [("tier", "fast", "2.5")]
    assert registry.choose("tier", "fast").__name__ == "MineConfig"


def test_discovery_imports_no_heavy_module():
    source = """
        import sys
        import kvtier_core.cli
        from kvtier_core.config.registry import Registry
        from kvtier_core.config.load import load_config
        load_config({"version": 1, "tiers": [{"type": "heap", "capacity": "1GiB"}]}, Registry.of())
        print(sorted({"torch", "numpy", "vllm", "boto3", "redis"} & sys.modules.keys()))
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(source)], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


BROKEN = {
    "import boto33": "ModuleNotFoundError: No module named 'boto33'",
    "def oops(:": "SyntaxError: invalid syntax (bad_mine.py, line 1)",
    HEAD + "@hookimpl\ndef kvtier_backend(): return []": (
        "bad_mine implements kvtier_backend, which is not a hook; hooks: kvtier_backends, kvtier_eviction_policies, "
        "kvtier_token_databases, kvtier_serializers, kvtier_observers"
    ),
    HEAD + "@hookimpl\ndef kvtier_backends(config): return []": (
        "PluginValidationError: Plugin 'bad:mine' for hook 'kvtier_backends' hookimpl definition: "
        "kvtier_backends(config) Argument(s) {{'config'}} are declared in the hookimpl "
        "but can not be found in the hookspec"
    ),
    HEAD + "@hookimpl\ndef kvtier_backends(): return [7]": (
        "kvtier_backends offers 7, not a subclass of ArenaConfig or BackendConfig"
    ),
    HEAD + "@hookimpl\ndef kvtier_eviction_policies(): return [Offered]": (
        "kvtier_eviction_policies offers <class 'bad_mine.Offered'>, not a subclass of EvictionConfig"
    ),
    HEAD + "@hookimpl\ndef kvtier_backends(): return [BackendConfig]": ("BackendConfig is abstract; missing: open"),
    HEAD + "@hookimpl\ndef kvtier_backends(): return [Offered]": (
        "Offered is not itself an attrs class; decorate it with @attrs.frozen"
    ),
    backend("", ""): "MineConfig does not set 'type'",
    backend("", "My Tier"): "MineConfig has type 'My Tier'; a name may contain letters, digits, '-', '_' and '.'",
    backend("threads: int = 3"): "MineConfig has a field 'threads', which is reserved for the core",
    backend("ratio: complex = 3"): "MineConfig.ratio: a setting cannot have type <class 'complex'>",
    backend("ratio = attrs.field(default=3)"): "MineConfig.ratio has no type; annotate it",
    backend("ratio: Unheard = 3"): "NameError: name 'Unheard' is not defined",
    backend("").replace("[MineConfig]", "[MineConfig, MineConfig]"): "offers tier 'disk' twice",
    backend("").replace("@hookimpl\n", ""): ("bad_mine defines kvtier_backends without @hookimpl: it is never called"),
    backend("") + "\ndef kvtier_observers(): ...": (
        "bad_mine defines kvtier_observers without @hookimpl: it is never called"
    ),
    "x = 1": (
        "bad_mine implements none of the hooks: kvtier_backends, kvtier_eviction_policies, kvtier_token_databases, "
        "kvtier_serializers, kvtier_observers"
    ),
    backend("").replace("[MineConfig]", "MineConfig"): (
        "kvtier_backends returned a class, expected a list; write `return [MineConfig]`"
    ),
    backend("").replace("return [MineConfig]", "[MineConfig]"): (
        "kvtier_backends returned None, expected a list of Config classes"
    ),
    backend("").replace("[MineConfig]", "7"): "kvtier_backends returned 7, expected a list of Config classes",
    backend("").replace("return [MineConfig]", "yield MineConfig; raise OSError('no disk')"): (
        "kvtier_backends raised OSError: no disk"
    ),
    backend("").replace("return [MineConfig]", "raise ValueError('not\\ntoday')"): (
        "kvtier_backends raised ValueError: not today"
    ),
    backend("").replace("(Offered)", "(EvictionConfig)").replace("kvtier_backends", "kvtier_eviction_policies")
    + "\nMineConfig.open = lambda self: ...\nMineConfig.__abstractmethods__ = frozenset()"
    + "\nMineConfig.aliases = 'fast'": "MineConfig has aliases 'fast', expected a tuple of names",
}


@pytest.mark.parametrize("source", BROKEN, ids=range(len(BROKEN)))
def test_a_broken_plugin_is_kept_with_its_reason_and_hides_no_other(install, tmp_path, source):
    why = BROKEN[source].format(path=tmp_path)
    install("bad", "mine", source)
    install("good", "mine", backend("", "good"))
    registry = Registry.discover()
    assert [str(broken) for broken in registry.broken if broken.plugin == "bad:mine"] == [f"bad:mine 1.0: {why}"]
    assert installed_by(registry, "good:mine") == [("tier", "good", "1.0")]
    assert installed_by(registry, "bad:mine") == []


def test_naming_a_broken_plugin_explains_what_is_broken(install):
    install("kvtier-s99", "s99", "import boto33", "0.4.1")
    assert Registry.discover().choose("tier", "s99") == Unavailable(
        "tier 's99' may be installed, but a plugin is broken: "
        "kvtier-s99:s99 0.4.1: ModuleNotFoundError: No module named 'boto33'"
    )


def test_two_plugins_with_one_name_are_told_to_whoever_asks_for_it(install):
    install("b-tiers", "x", backend("", "same"))
    install("a-tiers", "x", backend("", "same"))
    install("a-tiers", "y", backend("", "other"))
    registry = Registry.discover()
    clash = "tier 'same' is offered by a-tiers:x and by b-tiers:x"
    way_out = "write 'same@a-tiers:x' or 'same@b-tiers:x'"
    assert registry.choose("tier", "same") == Unavailable(clash, way_out)
    assert registry.choose("tier", "other").type == "other"
    assert registry.clashes() == [f"{clash}; {way_out}"]
    mine, yours = registry.choose("tier", "same@a-tiers:x"), registry.choose("tier", "same@b-tiers:x")
    assert (mine.__module__, yours.__module__) == ("a_tiers_x", "b_tiers_x")


def test_a_name_that_the_core_has_too_can_be_chosen_by_its_full_name(install):
    """Of a clash with what the core ships, nothing could be uninstalled."""
    install("mine", "x", backend("", "heap"))
    registry = Registry.discover()
    tier = {"type": "heap@mine:x", "capacity": "1GiB"}
    config = load_config({"version": 1, "tiers": [{"type": "heap@kvtier:builtin", "capacity": "1GiB"}, tier]}, registry)
    assert [(tier.name, tier.config.__module__) for tier in config.tiers] == [
        ("heap", "kvtier_core.builtin.heap"),
        ("heap#2", "mine_x"),
    ]


def policy(name, aliases):
    """The source of a plugin that offers one eviction policy."""
    return (
        HEAD
        + f"""
@attrs.frozen
class MineConfig(EvictionConfig):
    type: ClassVar[str] = {name!r}
    aliases: ClassVar = {aliases!r}
    def open(self): ...

@hookimpl
def kvtier_eviction_policies():
    return [MineConfig]
"""
    )


def test_an_alias_is_a_name(install, capsys):
    install("mine", "x", policy("mine", ("my", "m")))
    registry = Registry.discover()
    mine = registry.choose("eviction policy", "mine")
    assert {registry.choose("eviction policy", name) for name in ("my", "m", "mine@mine:x")} == {mine}
    assert registry.choose("eviction policy", "git") is registry.choose("eviction policy", "gittins") is GittinsConfig
    assert main(["plugins", "--strict"]) == 0
    assert "eviction policy  mine (my, m)" in capsys.readouterr().out


@pytest.mark.parametrize(("name", "aliases"), [("git", ()), ("mine", ("x", "git"))])
def test_an_alias_clashes_with_whatever_has_its_name(install, name, aliases):
    install("mine", "x", policy(name, aliases))
    registry = Registry.discover()
    unavailable = registry.choose("eviction policy", "git")
    of_mine = "" if name == "git" else " (an alias of 'mine')"
    assert unavailable == Unavailable(
        "eviction policy 'git' is offered by kvtier:builtin (an alias of 'gittins')" + f" and by mine:x{of_mine}",
        f"write 'gittins@kvtier:builtin' or '{name}@mine:x'",
    )
    assert registry.clashes() == [f"{unavailable.why}; {unavailable.hint}"]
    assert registry.choose("eviction policy", "gittins") is GittinsConfig


def test_broken_and_clashing_plugins_are_logged_at_discovery(install, caplog):
    """An engine whose YAML names none of them would not mention them."""
    install("bad", "x", "import boto33")
    install("mine", "y", policy("lru", ()))
    Registry.discover().log_problems()
    clash = "eviction policy 'lru' is offered by kvtier:builtin and by mine:y"
    assert [(record.levelname, record.name, record.getMessage()) for record in caplog.records] == [
        (
            "WARNING",
            "kvtier",
            "kvtier: plugin failed to load, ignored: bad:x 1.0: ModuleNotFoundError: No module named 'boto33'",
        ),
        ("WARNING", "kvtier", f"kvtier: {clash}; write 'lru@kvtier:builtin' or 'lru@mine:y'"),
    ]


def test_names_that_no_plugin_offers():
    registry = Registry.of()
    assert registry.choose("tier", "tape") == Unavailable("no tier 'tape' is installed (have: heap)")
    assert registry.choose("eviction policy", "tape") == Unavailable(
        "no eviction policy 'tape' is installed (have: gittins, lru)"
    )
    assert registry.choose("tier", "haep") == Unavailable(
        "no tier 'haep' is installed (have: heap)", "did you mean 'heap'?"
    )


@pytest.mark.parametrize("extra", ["cpu", "disk", "gds", "mooncake", "peers", "redis", "s3"])
def test_an_extra_is_suggested(extra):
    assert Registry.of().choose("tier", extra) == Unavailable(
        f"no tier '{extra}' is installed (have: heap)", f"pip install 'kvtier[{extra}]'"
    )


def test_an_extra_is_suggested_for_each_policy_codec_and_observer_of_ours():
    ours = Registry.of(policies, lossy, observers, simulate)
    offers = {(offer.kind, offer.name) for offer in ours.offers() if not offer.plugin.startswith("kvtier:")}
    assert offers == registry._EXTRAS.keys()
    assert Registry.of().choose("serializer", "int8").hint == "pip install 'kvtier[lossy]'"
    assert Registry.of().choose("eviction policy", "lfu").hint == "pip install 'kvtier[policies]'"
    assert Registry.of().choose("observer", "opentelemetry").hint == "pip install 'kvtier[otel]'"


@pytest.mark.parametrize("name", ["kafka", "all", "plot", "c", "cpu.*"])
def test_no_extra_is_suggested_that_does_not_exist_or_brings_no_such_tier(name):
    assert "pip" not in Registry.of().choose("tier", name).hint


def test_a_new_extra_is_suggested_without_a_change_here(monkeypatch):
    required = ["attrs>=23.2", 'kvtier-s3>=1; extra == "s3"', 'kvtier-s3x; extra == "all"']
    monkeypatch.setattr(metadata, "requires", lambda name: required)
    assert Registry.of().choose("tier", "s3").hint == "pip install 'kvtier[s3]'"
    assert Registry.of().choose("tier", "s3x").hint == ""
    monkeypatch.setattr(metadata, "requires", lambda name: metadata.distribution("no-such-distribution"))
    assert Registry.of().choose("tier", "s3").hint == ""


@pytest.mark.parametrize("name", ["t", "tier", "acme-tier", "kvtier", "a"])
def test_no_plugin_is_blamed_for_a_part_of_its_name(install, name):
    install("acme-tiers", "s99", "import boto33")
    unavailable = Registry.discover().choose("tier", name)
    assert unavailable.why.startswith(f"no tier '{name}' is installed")
    assert unavailable.hint in ("failed to load: acme-tiers:s99", "did you mean 'heap'?")
