"""Finds installed plugins that are written for another kvtier than this one, and the release to install instead.

pip keeps to the bounds that a plugin states when it installs it, and not afterwards: a later `pip install kvtier==…`
merely warns.
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

_GROUP = re.compile(r"kvtier\.v([0-9]+)")


def entry_points() -> list[metadata.EntryPoint]:
    """All plugins: those for this version of the interface, and those that are for other versions only."""
    every = metadata.entry_points()
    found = [entry for group in every.groups if _GROUP.fullmatch(group) for entry in every.select(group=group)]
    usable = {(entry.dist.name, entry.name) for entry in found if entry.group == GROUP}
    return [entry for entry in found if entry.group == GROUP or (entry.dist.name, entry.name) not in usable]


def load(entry: metadata.EntryPoint, version: str) -> Any:
    """Import a plugin. Raises ContractError if it is not for kvtier ``version``, or for its plugin interface."""
    if entry.group != GROUP:
        theirs, ours = (int(_GROUP.fullmatch(group)[1]) for group in (entry.group, GROUP))
        newer = "kvtier" if theirs > ours else entry.dist.name
        why = f"is written for version {theirs} of the plugin interface, and kvtier {version} has version {ours}"
        raise ContractError(f"{why}; pip install --upgrade {newer}")
    bounds = bounds_of(entry.dist.requires or [])
    if not within(version, bounds):
        why = f"requires kvtier {bounds}, and this is kvtier {version}"
        raise ContractError(f"{why}; pip install 'kvtier{bounds}', or another release of {entry.dist.name}")
    return entry.load()


def bounds_of(requires: list[str]) -> SpecifierSet:
    """The bounds of a distribution on kvtier, always and not only for an extra."""
    bounds = SpecifierSet()
    for each in requires:
        with contextlib.suppress(InvalidRequirement):  # for pip to judge
            requirement = Requirement(each)
            if canonicalize_name(requirement.name) == "kvtier" and requirement.marker is None:
                bounds &= requirement.specifier
    return bounds


def within(version: str, bounds: SpecifierSet) -> bool:
    """Is the release of this version within these bounds? A version that cannot be read is excluded by none."""
    try:
        return Version(version).base_version in bounds
    except InvalidVersion:
        return True
