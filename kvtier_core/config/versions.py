"""Finds installed plugins that are written for another kvtier than this one, and the release to install instead.

pip keeps to the bounds that a plugin states when it installs it, and not afterwards: a later `pip install kvtier==…`
merely warns.
"""

from __future__ import annotations

import operator
import re
from importlib import metadata
from typing import Any

from kvtier_core.errors import ContractError
from kvtier_core.hookspecs import GROUP

_GROUP = re.compile(r"kvtier\.v([0-9]+)")
_ON_KVTIER = re.compile(r"kvtier(?![\w.-])\s*(?:\[[^\]]*\])?\s*\(?([^;()]*)\)?\s*", re.IGNORECASE)
_CLAUSE = re.compile(r"(==|!=|<=|>=|<|>|~=)\s*([0-9]+(?:\.[0-9]+)*)(\.\*)?")
_RELEASE = re.compile(r"[0-9]+(?:\.[0-9]+)*")
_COMPARE = {"<=": operator.le, ">=": operator.ge, "<": operator.lt, ">": operator.gt}


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


def bounds_of(requires: list[str]) -> str:
    """The bounds of a distribution on kvtier, always and not only for an extra: ``>=0.1,<2``; empty if nothing."""
    found = (_ON_KVTIER.fullmatch(requirement) for requirement in requires)
    return ",".join(match[1].strip() for match in found if match and match[1].strip())


def within(version: str, bounds: str) -> bool:
    """Is a version within these bounds? Bounds that cannot be read here are for pip to judge, and exclude nothing."""
    release = _RELEASE.match(version)
    return release is None or all(_keeps(_numbers(release[0]), clause.strip()) for clause in bounds.split(","))


def _keeps(release: tuple[int, ...], clause: str) -> bool:
    match = _CLAUSE.fullmatch(clause)
    if match is None:
        return True
    sign, bound = match[1], _numbers(match[2])
    if sign == "~=":
        return _at_length(release, bound) >= bound and release[: len(bound) - 1] == bound[:-1]
    if sign in ("==", "!="):
        length = len(bound) if match[3] else max(len(bound), len(release))
        equal = _at_length(release, bound)[:length] == (*bound, *[0] * (length - len(bound)))
        return equal == (sign == "==")
    longest = max(len(bound), len(release))
    return _COMPARE[sign](*((*numbers, *[0] * (longest - len(numbers))) for numbers in (release, bound)))


def _numbers(release: str) -> tuple[int, ...]:
    return tuple(map(int, release.split(".")))


def _at_length(release: tuple[int, ...], bound: tuple[int, ...]) -> tuple[int, ...]:
    """With zeros behind it, so that it is not shorter than the bound."""
    return (*release, *[0] * (len(bound) - len(release)))
