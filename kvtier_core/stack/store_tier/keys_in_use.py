"""The keys that calls in flight to a backend name."""

from __future__ import annotations

import enum
from collections.abc import Iterable

from kvtier_core.errors import ContractError
from kvtier_core.types import ChunkKey


class Use(enum.Enum):
    """What a call does with a key."""

    WRITING = "is being written"
    READING = "is being read"
    LANDING = "is read by the engine's workers"  # as often as they like: it stays where it is
    DELETING = "is still being deleted"  # and stays in the index until the delete has completed
    QUARANTINING = "is being put in quarantine"  # in a shared store


class KeysInUse(dict[ChunkKey, Use]):
    """Ensures that no two calls in flight name the same key, as every backend is promised."""

    def begin(self, keys: Iterable[ChunkKey], use: Use) -> None:
        """A call names these keys until each is deleted from this dict. Raises ContractError if one is in use."""
        for key in keys:
            if key in self:
                raise ContractError("two calls in flight would name the same key")
            self[key] = use
