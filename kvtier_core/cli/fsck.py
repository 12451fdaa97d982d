"""`kvtier fsck`: what lies in a tier, and whether it can ever be served."""

from __future__ import annotations

import argparse
import enum
import sys
from collections import Counter
from collections.abc import Iterator

from kvtier_core.config.model import StoreTierConfig, load_config
from kvtier_core.config.registry import Registry
from kvtier_core.errors import BackendError, ConfigError
from kvtier_core.frames.format import Damage, inspect
from kvtier_core.interfaces import Stored
from kvtier_core.types import Nbytes


class Finding(enum.Enum):
    WHOLE = "whole"
    TORN = "torn"  #: a frame whose bytes are not those that were written
    FOREIGN = "foreign"  #: where only frames should be, and none
    ORPHANED = "orphaned"  #: a whole frame where nobody looks for it: of another key, namespace or epoch
    UNREADABLE = "unreadable"


def add_to(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser("fsck", help="read all of a tier that no engine uses, and tell what is damaged")
    parser.add_argument("tier", help="the name of a tier: its type, or disk#2 for the second of that type")
    parser.add_argument("--config", required=True, help="the configuration file that names the tier")
    parser.add_argument("--repair", action="store_true", help="remove what can never be served")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """0 if all is whole, or was made so; 1 if not; 2 if it could not be looked at."""
    try:
        config = load_config(options.config, Registry.discover())
        tiers = {tier.name: tier for tier in config.tiers if isinstance(tier, StoreTierConfig)}
        if options.tier not in tiers:
            have = ", ".join(tiers) or "none"
            raise BackendError(f"{options.config} has no tier {options.tier!r} below its arenas; it has: {have}")
        tier = tiers[options.tier]
        with tier.config.walk() as found:
            return _report(found, tier.capacity, repair=options.repair)
    except (ConfigError, BackendError) as error:
        print(error, file=sys.stderr)
        return 2


def _report(found: Iterator[Stored], capacity: Nbytes, *, repair: bool) -> int:
    counts: Counter[Finding] = Counter()
    nbytes: Counter[Finding] = Counter()
    left = 0
    for stored in found:
        finding, why = _look(stored, capacity)
        counts[finding] += 1
        nbytes[finding] += stored.nbytes
        if finding is not Finding.WHOLE:
            removed = repair and _remove(stored)
            print(f"{finding.value}: {stored.where}: {why}{': removed' if removed else ''}")
            left += not removed
    for finding in Finding:
        print(f"{finding.value.ljust(10)} {counts[finding]:>8}  {Nbytes(nbytes[finding])}")
    return 1 if left else 0


def _remove(stored: Stored) -> bool:
    try:
        stored.remove()
    except BackendError as error:
        print(error, file=sys.stderr)
        return False
    return True


def _look(stored: Stored, capacity: Nbytes) -> tuple[Finding, str]:
    if stored.key is None or stored.home is None:
        return Finding.FOREIGN, "not a frame by its name, place and length"
    if stored.nbytes > capacity:
        return Finding.FOREIGN, f"{Nbytes(stored.nbytes)}, and the tier's capacity is {capacity}"
    try:
        header = inspect(stored.nbytes, stored.read)
    except BackendError as error:
        return Finding.UNREADABLE, str(error).removeprefix(f"{stored.where}: ")
    if isinstance(header, Damage):
        return Finding.TORN, header.value
    if header.key != stored.key:
        return Finding.ORPHANED, "a frame of another key"
    if not header.namespace.startswith(stored.home):
        return Finding.ORPHANED, "a frame of another namespace or epoch"
    return Finding.WHOLE, ""
