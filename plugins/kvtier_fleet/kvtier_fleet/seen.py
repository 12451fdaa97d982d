"""What is read of a server's status. A server of another release may say more."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from msgspec import Struct

from kvtier_core.types import size


class Events(Struct):
    """Of one kind, since the start."""

    nbytes: int = 0


class Tier(Struct):
    """A tier of a namespace."""

    tier: str
    nbytes: int
    capacity: int
    chunks: int
    can_read: bool
    can_write: bool
    events: dict[str, Events]


class Space(Struct):
    """A namespace: the engines that share KV."""

    namespace: str
    model: str
    engines: int
    asked: int
    found: int
    tiers: list[Tier]


class Memory(Struct):
    """An arena that models share."""

    tier: str
    nbytes: int
    free: int
    kept: bool


class Seen(Struct):
    """The status of one server."""

    boot: str
    uptime: float  #: seconds
    at: float  #: seconds since 1970
    sessions: int
    memory: list[Memory]
    namespaces: list[Space]

    def resting(self) -> list[str]:
        """The tiers that are not used now, with their models."""
        tiers = ((space, tier) for space in self.namespaces for tier in space.tiers)
        return [f"{tier.tier} of {space.model}" for space, tier in tiers if not (tier.can_read and tier.can_write)]

    def moved(self, kind: str) -> int:
        """Bytes of these events in all tiers, since the start."""
        tiers = (tier for space in self.namespaces for tier in space.tiers)
        return sum(tier.events[kind].nbytes for tier in tiers if kind in tier.events)


HEAD = ("server", "engines", "models", "memory", "of", "chunks found", "up")


def row(name: str, several: Sequence[Seen]) -> list[str]:
    """The cells below `HEAD`: of one server, or the sums of several."""
    spaces = [space for each in several for space in each.namespaces]
    memory = [memory for each in several for memory in each.memory]
    asked = sum(space.asked for space in spaces)
    uptime = min((each.uptime for each in several), default=0.0)
    return [
        name,
        str(sum(each.sessions for each in several)),
        str(len({space.model for space in spaces})),
        size(sum(each.nbytes - each.free for each in memory)),
        size(sum(each.nbytes for each in memory)),
        f"{sum(space.found for space in spaces) / asked:.1%}" if asked else "-",
        f"{uptime // 3600:.0f} h {uptime % 3600 // 60:.0f} min",
    ]


def speeds(now: Mapping[str, Seen], before: Mapping[str, Seen]) -> Iterator[list[str]]:
    """GB/s of stores and of loads of each server between two looks; a dash if it restarted, or is new."""
    for name, each in now.items():
        earlier = before.get(name)
        if earlier and earlier.boot == each.boot and each.at > earlier.at:
            seconds = each.at - earlier.at
            yield [f"{(each.moved(kind) - earlier.moved(kind)) / seconds / 1e9:.2f}" for kind in ("stored", "loaded")]
        else:
            yield ["-", "-"]
