"""The codes with which Mooncake answers: 0 or a number of bytes, and negative ones."""

from __future__ import annotations

from collections.abc import Sequence

from kvtier_core.errors import BackendError, StoreFull

NO_ROOM = -200
_ILLEGAL_CLIENT = -601  # another one has begun to write the same key
_NOT_READY = -703
_NOT_FOUND = -704
#: There is no frame that fits into the view: nothing, one that is being written, or a longer one.
MISSES = {_NOT_FOUND, _NOT_READY, -600}
#: Another user writes the key, or has deleted it: what is there is that user's.
OVERTAKEN = {_ILLEGAL_CLIENT, _NOT_READY, _NOT_FOUND}
_OF_THE_STORE = {-900, -901}
_WORDS = {
    -101: "there is no segment",
    NO_ROOM: "there is no room",
    -706: "a reader has a lease",
    -707: "the lease ended before the frame had arrived",
    -708: "the frame is being copied",
    -714: "a reader is at it",
    -800: "the transfer failed: the client whose segment has the frame is gone, or hangs",
    -900: "the master cannot be reached",
    -901: "the master does not answer",
}


def error_of(where: str, code: int, nbytes: int = 0) -> BackendError:
    """The meaning of a code, of a store ``where``; ``nbytes`` were to be written."""
    why = f"{where}: {_WORDS.get(code, f'Mooncake answers {code}')}"
    return StoreFull(why, missing=nbytes) if code == NO_ROOM else BackendError(why)


def raise_if_store_failed(where: str, codes: Sequence[int]) -> None:
    """Raise if no key was served because the master was not."""
    if codes and all(code in _OF_THE_STORE for code in codes):
        raise error_of(where, codes[0])
