"""A plugin that is written for another kvtier is refused, with what to install; never loaded to see what happens."""

from __future__ import annotations

import pytest
from packaging.specifiers import SpecifierSet

from kvtier_core.config.registry import Registry
from kvtier_core.config.versions import bounds_of, within

PLUGIN = "raise AssertionError('it was imported')"


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Installs a distribution whose plugin must not be imported."""
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "not_for_us.py").write_text(PLUGIN)

    def install(groups: dict[str, str], *requires: str) -> None:
        info = tmp_path / "kvtier_other-3.1.dist-info"
        info.mkdir()
        lines = ["Metadata-Version: 2.1", "Name: kvtier-other", "Version: 3.1"]
        (info / "METADATA").write_text("\n".join([*lines, *(f"Requires-Dist: {each}" for each in requires)]) + "\n")
        (info / "entry_points.txt").write_text("".join(f"[{group}]\nother = {at}\n" for group, at in groups.items()))

    return install


def refusals() -> list[str]:
    return [broken.why for broken in Registry.discover().broken if broken.plugin == "kvtier-other:other"]


def test_a_newer_interface_needs_a_newer_kvtier(installed):
    installed({"kvtier.v2": "not_for_us"})
    assert refusals() == [
        "is written for version 2 of the plugin interface, but kvtier 0.1.0 has version 1; pip install --upgrade kvtier"
    ]


def test_an_older_interface_needs_a_newer_plugin(installed):
    installed({"kvtier.v0": "not_for_us"})
    (why,) = refusals()
    assert why.endswith("has version 1; pip install --upgrade kvtier-other")


def test_a_plugin_may_be_written_for_several_versions(installed):
    installed({"kvtier.v1": "kvtier_cpu.plugin", "kvtier.v2": "not_for_us"})
    registry = Registry.discover()
    assert not registry.broken
    assert "kvtier-other:other" in {offer.plugin for offer in registry.offers()}


def test_bounds_that_exclude_this_kvtier(installed):
    installed({"kvtier.v1": "not_for_us"}, "attrs", "kvtier<2,>=1.4", "kvtier[testing]; extra == 'test'")
    assert refusals() == [
        "requires kvtier <2,>=1.4, but this is kvtier 0.1.0; "
        "pip install 'kvtier<2,>=1.4', or another release of kvtier-other"
    ]


def test_the_name_that_a_user_wrote_leads_to_the_reason(installed):
    installed({"kvtier.v2": "not_for_us"})
    assert "pip install --upgrade kvtier" in Registry.discover().choose("tier", "other").why


@pytest.mark.parametrize(
    ("requires", "bounds"),
    [
        (["kvtier"], ""),
        (["kvtier>=0.1,<2"], "<2,>=0.1"),
        (["kvtier (>=0.1)"], ">=0.1"),
        (["kvtier[testing] >=0.1"], ">=0.1"),
        (["kvtier>=9; extra == 'test'", "kvtier-disk>=9", "attrs<1", "kvtier>=oddly written"], ""),
    ],
)
def test_bounds_are_read(requires, bounds):
    assert str(bounds_of(requires)) == bounds


@pytest.mark.parametrize(
    ("version", "bounds", "answer"),
    [
        ("0.1.0", "", True),
        ("0.1.0", ">=0.1,<2", True),
        ("0.1", ">=0.1.0", True),
        ("2.0", ">=0.1,<2", False),
        ("2.0", "<2.0.1", True),
        ("1.10", ">1.9", True),
        ("1.9", ">1.9.0", False),
        ("1.9", "<=1.9.0", True),
        ("1.2", "~=1.1", True),
        ("2.0", "~=1.1", False),
        ("1.2", "~=1.1.0", False),
        ("1.2.3", "==1.2.*", True),
        ("1.3", "==1.2.*", False),
        ("1.2", "==1.2.0", True),
        ("1.2.0", "!=1.2", False),
        ("1.2.1", "!=1.2", True),
        ("0.1.0.dev3", ">=0.1", True),
        ("unknown", ">=9", True),
    ],
)
def test_bounds_are_kept(version, bounds, answer):
    assert within(version, SpecifierSet(bounds)) is answer
