"""Text from outside, whose length and characters somebody else chooses: a client, a peer, a store, the name of a file.

It becomes `Printable` where it enters, and only that is kept, logged and shown: a line break would forge a line of the
log, and a terminal obeys escape sequences. What identity depends on counts as a whole (`stand_in`).
"""

from __future__ import annotations

import hashlib
from typing import NewType

#: Text for people: a bounded number of characters on one line. Made by `printable`.
Printable = NewType("Printable", str)

#: Characters of it; of a path, which people need as a whole; and of the beginning that long text keeps.
LONGEST, LONGEST_PATH = 128, 4096
_DIGEST_NBYTES = 8
BEGINNING = LONGEST - len("…") - 2 * _DIGEST_NBYTES


def printable(text: str, longest: int = LONGEST) -> Printable:
    """The text for people, with control characters and the like escaped as in Python.

    If it is longer than ``longest`` characters, a digest of the whole follows its beginning. Printable text stays as it
    is.
    """
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text[: longest + 1])
    if len(shown) > longest:
        digest = _digest(text, _DIGEST_NBYTES)
        shown = f"{shown[: longest - len(digest) - 1]}…{digest}"
    return Printable(shown)


def stand_in(text: str) -> str:
    """What stands for the text where it identifies something: itself, or if it is long, a digest of the whole.

    That is longer than any text that stands for itself, so no two texts have the same.
    """
    return text if len(text) <= LONGEST else f"#{_digest(text, 64)}"


def _digest(text: str, nbytes: int) -> str:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=nbytes).hexdigest()
