"""`kvtier clear FILE`: removes the frames in the store tiers of a file."""

from __future__ import annotations

import argparse
import re
from collections import Counter
from collections.abc import Callable

from kvtier_core.cli.output import FINE, PROBLEMS, Output, agreed
from kvtier_core.config.load import load_config
from kvtier_core.config.model import StoreTierConfig
from kvtier_core.config.registry import Registry
from kvtier_core.errors import BackendError, ConfigError, Gone, Problem
from kvtier_core.interfaces import Stored
from kvtier_core.layouts import tenant_mark
from kvtier_core.types import size
from kvtier_doctor.explain import add_salt_to, salt_of
from kvtier_doctor.stores import tenant_frames, walk

_DIGEST = re.compile(r"[0-9a-f]{2,64}")


def add_to(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "clear",
        help="remove the frames in the store tiers of a file",
        description="Remove the frames in the store tiers of a file. Other files are left for kvtier fsck.",
    )
    parser.add_argument("file")
    parser.add_argument("--tier", help="only this tier, such as disk or disk#2")
    parser.add_argument("--namespace", help="only frames of this identity: its first digits, as an engine logs it")
    add_salt_to(parser, "only frames of requests with this cache_salt")
    parser.add_argument("--shared", action="store_true", help="also from stores that other engines may use")
    parser.add_argument("--yes", action="store_true", help="do not ask")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace, output: Output) -> int:
    """A line for each tier. Raises ConfigError and BackendError."""
    if options.namespace and not (_DIGEST.fullmatch(options.namespace) and len(options.namespace) % 2 == 0):
        why = "not hexadecimal digits of an identity"
        raise ConfigError(
            [Problem("--namespace", options.namespace, why, "copy an even number of digits from the log")]
        )
    chosen = _chosen(options)
    tenant = tenant_mark(salt_of(options))
    what = f"all frames of identity {options.namespace}…" if options.namespace else "everything"
    what += f" of the tenant of {options.cache_salt}" if tenant else ""
    condemned = [tenant_frames(tier, tenant) for tier in chosen]  # before anything is removed: a secret may be missing
    names = ", ".join(tier.name for tier in chosen)
    if not options.yes and not agreed(f"Remove {what} from {names}? [y/N] "):
        output.warn("nothing was removed")
        return PROBLEMS
    output.value = {}
    for tier, is_condemned in zip(chosen, condemned, strict=True):
        removed, errors = _clear(tier, options.namespace, is_condemned)
        output.value[tier.name] = {**removed, "failed": errors}
        output.say(f"{tier.name}: {removed['frames']} frames removed, {size(removed['nbytes'])}")
        for error in errors:
            output.warn(error)
    return PROBLEMS if any(each["failed"] for each in output.value.values()) else FINE


def _chosen(options: argparse.Namespace) -> list[StoreTierConfig]:
    """The tiers to clear. Raises BackendError if there are none, or if one is shared and ``--shared`` was not given."""
    stores = [tier for tier in load_config(options.file, Registry.discover()).stores if not tier.config.read_only]
    chosen = [tier for tier in stores if options.tier in (None, tier.name)]
    if not chosen:
        have = ", ".join(tier.name for tier in stores) or "none"
        raise BackendError(f"{options.file}: no tier below its arenas to clear; it has: {have}")
    shared = [tier.name for tier in chosen if tier.config.shared]
    if shared and not options.shared:
        why = f"{options.file}: {', '.join(shared)}: other engines may use its frames"
        raise BackendError(f"{why}; pass --shared, or name another tier with --tier")
    return chosen


def _clear(
    tier: StoreTierConfig, namespace: str | None, is_condemned: Callable[[Stored], bool]
) -> tuple[Counter[str], list[str]]:
    """Remove frames; returns their number and bytes, and the errors of frames that remain."""
    removed, errors = Counter(frames=0, nbytes=0), []
    with walk(tier) as found:
        for stored in found:
            if stored.home is None or not _is_of(stored.home, namespace) or not is_condemned(stored):
                continue
            try:
                stored.remove()
                removed.update(frames=1, nbytes=stored.nbytes)
            except Gone:
                continue
            except BackendError as error:
                errors.append(str(error))
    if tier.config.shared and tier.capacity is not None:
        tier.config.recount(tier.capacity)
    return removed, errors


def _is_of(home: bytes, namespace: str | None) -> bool:
    """Does this digest match the named digits? A store may keep fewer digits than were named."""
    return namespace is None or home.hex().startswith(namespace) or namespace.startswith(home.hex())
