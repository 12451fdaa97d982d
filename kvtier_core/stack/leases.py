"""What lookups pinned for their holders."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import attrs

from kvtier_core.types import ChunkKey, Slot


@attrs.define
class Lease:
    """READY chunks of one path that are pinned for one holder."""

    path: list[ChunkKey] = attrs.field(factory=list)  #: the leading chunks that are pinned
    slots: list[Slot] = attrs.field(factory=list)  #: of each of them
    sources: list[str] = attrs.field(factory=list)  #: for each of them the tier that supplied it
    beyond: dict[ChunkKey, tuple[Slot, str]] = attrs.field(factory=dict)  #: pinned chunks behind one that is missing
    awaited: set[ChunkKey] = attrs.field(factory=set)  #: on their way: to be pinned when they arrive
    valid: bool = True  #: False once everything was invalidated: the slots stay pinned, and are never found again

    def holds_for(self, path: Sequence[ChunkKey]) -> bool:
        """Is all that is pinned of this path, and may it still be found?"""
        return self.valid and list(path[: len(self.path)]) == self.path and self.beyond.keys() <= set(path)

    def extend(self, keys: Sequence[ChunkKey], slots: Sequence[Slot], sources: Sequence[str]) -> None:
        """Append chunks to the leading run."""
        self.path += keys
        self.slots += slots
        self.sources += sources

    def pinned(self) -> Iterator[Slot]:
        """All slots, once each."""
        yield from self.slots
        yield from (slot for slot, _ in self.beyond.values())
