"""Finds installed plugins that are written for another version of kvtier, and the release to install instead.

pip enforces the bounds of a plugin when it installs the plugin, but not afterwards: a later `pip install kvtier==…`
only warns.
"""

from __future__ import annotations

import contextlib
import re
from importlib import metadata
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from kvtier_core.errors import ContractError
from kvtier_core.hookspecs import GROUP

_GROUP = re.compile(r"kvtier\.v[0-9]+")


def own_version() -> str:
    """The version of kvtier; empty if it is not installed."""
    return next((found.version for found in metadata.distributions(name="kvtier")), "")


def entry_points() -> list[tuple[metadata.Distribution, metadata.EntryPoint]]:
    """All plugins: those for this version of the interface, and those that are for other versions only."""
    every = metadata.entry_points()
    entries = [entry for group in every.groups if _GROUP.fullmatch(group) for entry in every.select(group=group)]
    found = [(entry.dist, entry) for entry in entries if entry.dist is not None]
    usable = {(dist.name, entry.name) for dist, entry in found if entry.group == GROUP}
    return [(dist, entry) for dist, entry in found if entry.group == GROUP or (dist.name, entry.name) not in usable]


def load(dist: metadata.Distribution, entry: metadata.EntryPoint, version: str) -> Any:
    """Import a plugin. Raises ContractError if it is not for kvtier ``version``, or for its plugin interface."""
    if entry.group != GROUP:
        theirs, ours = (int(group.rpartition(".v")[2]) for group in (entry.group, GROUP))
        newer = "kvtier" if theirs > ours else dist.name
        why = f"is written for version {theirs} of the plugin interface, but kvtier {version} has version {ours}"
        raise ContractError(f"{why}; pip install --upgrade {newer}")
    bounds = bounds_of(dist.requires or [])
    if not within(version, bounds):
        why = f"requires kvtier {bounds}, but this is kvtier {version}"
        raise ContractError(f"{why}; pip install 'kvtier{bounds}', or another release of {dist.name}")
    return entry.load()


def bounds_of(requires: list[str]) -> SpecifierSet:
    """The bounds on kvtier that a distribution always has, not only for an extra."""
    bounds = SpecifierSet()
    for each in requires:
        with contextlib.suppress(InvalidRequirement):  # for pip to judge
            requirement = Requirement(each)
            if canonicalize_name(requirement.name) == "kvtier" and requirement.marker is None:
                bounds &= requirement.specifier
    return bounds


def lacking(distribution: str, extra: str = "") -> list[str]:
    """The names of what a distribution, or this extra of it, requires and is not installed."""
    names = []
    for each in metadata.requires(distribution) or []:
        requirement = Requirement(each)
        if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
            names += [requirement.name] if not any(metadata.distributions(name=requirement.name)) else []
    return names


def within(version: str, bounds: SpecifierSet) -> bool:
    """Is the release of this version within these bounds? An unreadable version is within all bounds."""
    try:
        return Version(version).base_version in bounds
    except InvalidVersion:
        return True
