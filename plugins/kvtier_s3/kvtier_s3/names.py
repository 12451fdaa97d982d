"""The names of objects: ``prefix/namespace/first byte/key.kv``, in hex, made from nothing else."""

from __future__ import annotations

import re

import attrs

from kvtier_core.storekit.namespaces import FACTS, home_of
from kvtier_core.types import FRAME_ALIGNMENT, ChunkKey, Namespace

_FRAME = re.compile(r"([0-9a-f]{16})/([0-9a-f]{2})/(\2[0-9a-f]{62})\.kv")


@attrs.frozen
class Names:
    """The names below a prefix, of one namespace."""

    prefix: str
    home: str  #: the first digits of the namespace's digest

    @classmethod
    def of(cls, prefix: str, namespace: Namespace) -> Names:
        return cls(prefix, home_of(namespace))

    @property
    def folder(self) -> str:
        """The prefix of the names of this namespace's frames."""
        return f"{self.prefix}/{self.home}/"

    @property
    def facts(self) -> str:
        """The object that explains the namespace."""
        return f"{self.folder}{FACTS}"

    def frame(self, key: ChunkKey) -> str:
        """The object with the frame of this key."""
        digits = key.hex()
        return f"{self.folder}{digits[:2]}/{digits}.kv"


def parsed(prefix: str, name: str, nbytes: int) -> tuple[bytes, ChunkKey] | None:
    """The first bytes of the namespace's digest and the key, of an object's name; None if it cannot be a frame."""
    found = _FRAME.fullmatch(name.removeprefix(f"{prefix}/"))
    if found is None or not nbytes or nbytes % FRAME_ALIGNMENT:
        return None
    return bytes.fromhex(found[1]), ChunkKey(bytes.fromhex(found[3]))
