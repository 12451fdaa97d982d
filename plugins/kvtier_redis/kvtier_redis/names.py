"""The names of a tier's values on a server, and the manifest of a frame."""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Iterator, Sequence

import attrs

from kvtier_core.storekit.namespaces import home_of
from kvtier_core.types import FRAME_ALIGNMENT, KEY_NBYTES, ChunkKey, Namespace

#: Seconds for which parts that no manifest names may belong to a write that is still under way.
UNFINISHED = 3600
#: No frame has more parts. So a manifest that another program wrote cannot make this process list millions of names.
_MOST_PARTS = 1 << 16
_MANIFEST = re.compile(rb"kvtier-1 ([0-9]{1,15}) ([0-9]{1,15}) ([0-9a-f]{24})")


#: Home, key, and for a part its write.
_FRAME = re.compile(rb"([0-9a-f]{16}):\{([0-9a-f]{64})\}(?::([0-9a-f]{24}):[0-9]{1,5})?")


@attrs.frozen
class Manifest:
    """Locates the parts of a frame. A frame without one cannot be found."""

    nbytes: int  #: of the frame
    part: int  #: bytes of each part but the last
    write: str  #: names the write, so that no reader takes parts of two writers for one frame

    @classmethod
    def new(cls, nbytes: int, part: int) -> Manifest:
        """The manifest of a write that begins now."""
        part = max(part, -(-nbytes // _MOST_PARTS))
        return cls(nbytes, part, f"{int(time.time()):08x}{secrets.token_hex(8)}")

    @classmethod
    def decode(cls, value: object) -> Manifest | None:
        """Read what `encode` made; None for anything else."""
        match = _MANIFEST.fullmatch(value) if isinstance(value, bytes) else None
        if match is None:
            return None
        manifest = cls(int(match[1]), int(match[2]), match[3].decode())
        sane = manifest.nbytes > 0 and manifest.part >= FRAME_ALIGNMENT and manifest.count <= _MOST_PARTS
        return manifest if sane else None

    def encode(self) -> bytes:
        return b"kvtier-1 %d %d %b" % (self.nbytes, self.part, self.write.encode())

    @property
    def count(self) -> int:
        """Number of its parts."""
        return -(-self.nbytes // self.part)

    def parts(self, name: bytes) -> Iterator[tuple[bytes, int, int]]:
        """Name, begin and end of each part of the frame that is called ``name``."""
        for number in range(self.count):
            begin = number * self.part
            yield b"%b:%b:%d" % (name, self.write.encode(), number), begin, min(begin + self.part, self.nbytes)

    def part_names(self, name: bytes) -> list[bytes]:
        return [part for part, _, _ in self.parts(name)]


@attrs.frozen
class Names:
    """The names under one prefix. In a cluster, the text in braces decides which node has a name."""

    prefix: str

    def home(self, namespace: Namespace) -> str:
        """The prefix of the names of a namespace's frames."""
        return f"{self.prefix}:{home_of(namespace)}:"

    @property
    def namespaces(self) -> bytes:
        """A hash with the facts of all namespaces, by their digests."""
        return f"{self.prefix}:namespaces".encode()

    def of_space(self, what: str) -> bytes:
        """A name in the account of a capacity. All of these are on one node."""
        return f"{self.prefix}:{{space}}:{what}".encode()

    def is_frame(self, name: bytes) -> bool:
        """Is this the name of a manifest?"""
        found = self.parse(name)
        return found is not None and found.write is None

    def parse(self, name: bytes) -> Found | None:
        """The manifest or part of this name; None if it is neither."""
        rest = name[len(self.prefix) + 1 :]
        if not name.startswith(f"{self.prefix}:".encode()) or (match := _FRAME.fullmatch(rest)) is None:
            return None
        frame = name[: len(self.prefix) + 1 + match.end(2) + 1]
        home, key = (bytes.fromhex(match[i].decode()) for i in (1, 2))
        return Found(name, frame, home, ChunkKey(key), None if match[3] is None else match[3].decode())


@attrs.frozen
class Found:
    """A name that a server listed."""

    name: bytes
    frame: bytes  #: the name of the frame that it is, or that it is a part of
    home: bytes  #: the first bytes of the digest of its namespace
    key: ChunkKey
    write: str | None  #: of a part: which write it belongs to; None: it is the manifest

    @property
    def is_recent(self) -> bool:
        """May this part be of a write that is still under way?"""
        return self.write is None or time.time() - int(self.write[:8], 16) < UNFINISHED


def frame_name(home: str, key: ChunkKey) -> bytes:
    """The name of a frame, and of its manifest."""
    return f"{home}{{{key.hex()}}}".encode()


def get_all(home: str, keys: Sequence[ChunkKey]) -> bytes:
    """MGET of the manifests of all keys, in one buffer.

    Made here because packing name by name takes as long as the server's answer.
    """
    length = len(home) + 2 * KEY_NBYTES + 2
    between = f"}}\r\n${length}\r\n{home}{{"
    names = between.join([key.hex() for key in keys])
    return f"*{len(keys) + 1}\r\n$4\r\nMGET\r\n${length}\r\n{home}{{{names}}}\r\n".encode()
