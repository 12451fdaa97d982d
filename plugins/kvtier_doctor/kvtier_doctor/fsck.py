"""`kvtier fsck`: reads everything in a store tier and reports frames that cannot be served."""

from __future__ import annotations

import argparse
import enum
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import attrs

from kvtier_core.builtin.raw import RawConfig
from kvtier_core.cli.output import FINE, PROBLEMS, Output
from kvtier_core.config.model import StoreTierConfig
from kvtier_core.config.open import open_keyed_seal
from kvtier_core.errors import BackendError, Gone
from kvtier_core.frames.format import FrameError, Header, inspect, keyed_fields_of, payload_pieces
from kvtier_core.frames.identity import PACKED, RAW, CodecIdentity, Protection, identity_of
from kvtier_core.interfaces import SerializerConfig, Stored
from kvtier_core.layouts import tenant_mark
from kvtier_core.outside import LONGEST_PATH, printable
from kvtier_core.stack.store_tier.request_log import keys_beside
from kvtier_core.types import FRAME_HEADER_NBYTES, ChunkKey, Nbytes, size
from kvtier_doctor.explain import add_salt_to, salt_of
from kvtier_doctor.stores import store_tier, tenant_frames, walk

if TYPE_CHECKING:
    from kvtier_core.encoding.keyed_seal import KeyedSeal


class Finding(enum.Enum):
    """The findings in a store."""

    WHOLE = "whole"  #: a frame that the tier can serve
    TORN = "torn"  #: a frame whose bytes are not those that were written
    #: Of another codec, seal key or format version: another engine may be able to read it.
    INCOMPATIBLE = "incompatible"
    CONDEMNED = "of the tenant"  #: a frame of a tenant that was erased, as ``--cache-salt`` says
    FOREIGN = "foreign"  #: not a frame, where only frames should be
    ORPHANED = "orphaned"  #: a whole frame that no engine looks up: of another key, namespace or epoch
    UNREADABLE = "unreadable"
    POLICY = "policy"  #: for the tier's eviction policy, whole: its state, or a log of requests; belongs to no chunk


#: Served, or left for an engine that can read it.
_HARMLESS = {Finding.WHOLE, Finding.INCOMPATIBLE, Finding.POLICY}


def add_to(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "fsck",
        help="read all frames of a tier, and report the damaged ones",
        description="Read all frames of a tier, and report damage. No engine may use the tier unless it is shared.",
    )
    parser.add_argument("tier", help="the name of a tier: its type, or disk#2 for the second of that type")
    parser.add_argument("--config", required=True, help="the configuration file that names the tier")
    add_salt_to(parser, "also report frames of requests with this cache_salt, which were erased")
    parser.add_argument(
        "--repair", action="store_true", help="remove what no engine can ever use, and frames with this cache_salt"
    )
    parser.add_argument(
        "--remove-incompatible",
        action="store_true",
        help="also remove frames of other codecs, seal keys and format versions",
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace, output: Output) -> int:
    """A line for everything that cannot be served or was erased, then totals. Raises ConfigError and BackendError."""
    tier = store_tier(options.config, options.tier)
    mark = tenant_mark(salt_of(options))
    removable = set(Finding) - _HARMLESS if options.repair else set()
    if options.remove_incompatible:
        removable.add(Finding.INCOMPATIBLE)
    seals, condemned = _Seals.of(tier), tenant_frames(tier, mark) if mark else None
    report = _Report(output, tier.capacity, _codecs_of(tier.serializer), removable, seals, condemned)
    with walk(tier) as found:
        report.take_in(found)
    report.print_totals()
    if removable and tier.config.shared and tier.capacity is not None:
        tier.config.recount(tier.capacity)
    return PROBLEMS if report.left else FINE


def _codecs_of(serializer: SerializerConfig) -> tuple[CodecIdentity, CodecIdentity]:
    """The codecs of the tier below arenas that do not pack and below arenas that do: no file records which they are."""
    if isinstance(serializer, RawConfig):
        return RAW, PACKED
    return identity_of(serializer), identity_of(serializer, packed=True)


@attrs.define
class _Seals:
    """Checks the keyed seals of a tier's frames, as far as possible here."""

    protection: Protection  #: that the tier's frames have
    keyed_seal: KeyedSeal | None
    why_not: str = ""  #: why it cannot be done at all; empty if it can
    unchecked: int = 0  #: frames whose seal could not be checked

    @classmethod
    def of(cls, tier: StoreTierConfig) -> _Seals:
        """For a tier whose secret may not be at hand."""
        if tier.seal_key is None:
            return cls(Protection.NONE, None)
        protection = Protection.READING if tier.encrypt else Protection.FORGERY
        try:
            return cls(protection, open_keyed_seal(tier))
        except BackendError as error:
            return cls(protection, None, str(error))

    def verify(self, header: Header, stored: Stored) -> FrameError | None:
        """The fault in the seal of a frame that is otherwise whole, if one is known. Raises BackendError."""
        if header.protection is not self.protection:
            return FrameError.SEAL
        if self.protection is Protection.NONE:
            return None
        if self.keyed_seal is None:
            self.unchecked += 1
            return None
        page = memoryview(stored.read(0, FRAME_HEADER_NBYTES))
        if keyed_fields_of(page).key_id != self.keyed_seal.identity.key_id:
            return FrameError.SEAL
        if self.keyed_seal.matches(page, payload_pieces(header, stored.read)):
            return None
        if not self.keyed_seal.encrypts:
            return FrameError.FORGED
        self.unchecked += 1  # its request may have had a salt, which is not stored anywhere
        return None

    def is_of(self, keys: Sequence[ChunkKey], header: Header) -> bool | None:
        """Is it the frame of one of these keys? None if unknown: only the secret gives the names of frames."""
        if self.keyed_seal is not None:
            return header.key in self.keyed_seal.names(keys)
        return header.key in keys if self.protection is Protection.NONE else None

    def describe(self) -> Iterator[str]:
        """A line if some seals were not checked."""
        if self.unchecked:
            why = self.why_not or "they are encrypted with a salt, or forged"
            yield f"seals not checked: {self.unchecked}: {why}"


@attrs.define
class _Report:
    """Counts what a tier with this capacity, codecs and seals holds, and removes what is ``removable``."""

    output: Output
    capacity: Nbytes | None  #: None if the store bounds itself
    codecs_of_tier: tuple[CodecIdentity, CodecIdentity]
    removable: set[Finding]
    seals: _Seals
    condemned: Callable[[Stored], bool] | None  #: says of a frame whether it is of a tenant that was erased
    left: int = 0  #: damaged or condemned, and not removed
    counts: Counter[Finding] = attrs.field(factory=Counter)
    nbytes: Counter[Finding] = attrs.field(factory=Counter)
    codecs: Counter[str] = attrs.field(factory=Counter)  #: whole frames of each
    listed: list[dict[str, Any]] = attrs.field(factory=list)  #: what cannot be served

    def take_in(self, found: Iterator[Stored]) -> None:
        """Print a line for everything that cannot be served."""
        for stored in found:
            try:
                finding, why = self._look(stored)
            except Gone:
                continue
            self.counts[finding] += 1
            self.nbytes[finding] += stored.nbytes
            where, why = printable(stored.where, LONGEST_PATH), printable(why, LONGEST_PATH)
            removed = finding in self.removable and self._remove(stored)
            if finding not in (Finding.WHOLE, Finding.POLICY):
                self.output.say(f"{finding.value}: {where}: {why}{': removed' if removed else ''}")
                self.listed.append({"finding": finding.value, "where": where, "why": why, "removed": removed})
                self.left += finding not in _HARMLESS and not removed

    def print_totals(self) -> None:
        """A line for each finding, and one for each codec of whole frames."""
        for finding in Finding:
            total = f"{finding.value.ljust(12)} {self.counts[finding]:>8}  {size(self.nbytes[finding])}"
            if self.counts[finding] or finding not in (Finding.POLICY, Finding.CONDEMNED):
                self.output.say(total)
        self.output.say(*(f"codec: {codec}: {count}" for codec, count in sorted(self.codecs.items())))
        self.output.say(*self.seals.describe())
        self.output.value = {
            "found": {each.value: {"frames": self.counts[each], "nbytes": self.nbytes[each]} for each in Finding},
            "codecs": dict(self.codecs),
            "seals_not_checked": self.seals.unchecked,
            "listed": self.listed,
        }

    def _look(self, stored: Stored) -> tuple[Finding, str]:
        """The finding, and the reason. Raises Gone."""
        if stored.key is None or stored.home is None:
            return Finding.FOREIGN, "not a frame by its name, place and length"
        if self.condemned and self.condemned(stored):
            return Finding.CONDEMNED, "of a request with this cache_salt"
        if self.capacity is not None and stored.nbytes > self.capacity:
            return Finding.FOREIGN, f"{size(stored.nbytes)}, and the tier's capacity is {self.capacity}"
        try:
            header = inspect(stored.nbytes, stored.read)
            if isinstance(header, Header):
                header = self.seals.verify(header, stored) or header
        except Gone:
            raise
        except BackendError as error:
            return Finding.UNREADABLE, str(error).removeprefix(f"{stored.where}: ")
        if isinstance(header, FrameError):
            return Finding.INCOMPATIBLE if header.incompatible else Finding.TORN, header.value
        if header.key != stored.key:
            return Finding.ORPHANED, "a frame of another key"
        if not header.namespace.startswith(stored.home):
            return Finding.ORPHANED, "a frame of another namespace or epoch"
        # What is for the policy is raw, whatever the tier's serializer is.
        is_policys = header.codec == RAW and self.seals.is_of(keys_beside(header.namespace), header)
        if is_policys:
            return Finding.POLICY, ""
        self.codecs[str(header.codec)] += 1
        if header.codec not in self.codecs_of_tier and is_policys is not None:
            why = f"written with codec {header.codec}; the tier uses {self.codecs_of_tier[0]}"
            return Finding.INCOMPATIBLE, why
        return Finding.WHOLE, ""

    def _remove(self, stored: Stored) -> bool:
        try:
            stored.remove()
        except Gone:
            return True
        except BackendError as error:
            self.output.warn(printable(str(error), LONGEST_PATH))
            return False
        return True
