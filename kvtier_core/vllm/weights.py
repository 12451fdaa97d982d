"""A digest of the weights in a folder, in seconds and without torch.

Every tensor of every safetensors file counts: small ones whole, large ones by samples spread evenly over them.
Other formats say nothing about where their tensors lie and are read whole.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from operator import index
from pathlib import Path
from typing import BinaryIO

from kvtier_core.vllm import memo

#: Of a large tensor so many pieces of so many bytes are read; fewer where a file holds very many tensors.
_PIECE_NBYTES = 4 << 10
_PIECES = 64
_FEWEST_PIECES = 3
_PIECES_OF_A_FILE = 1 << 15
_READ_NBYTES = 8 << 20
_LONGEST_HEADER = 100_000_000  # bytes; what safetensors itself allows
#: The weights, what says how they are scaled and put together, and the model's own code.
_COUNTED = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf", "*.tensors", "*.json", "*.py")
_NO_TENSORS = (".json", ".py")

_Span = tuple[int, int]  # offset and bytes


def digest(path: Path) -> str | None:
    """Of a file or a folder of weights, as hex; None if there are none. Raises OSError, ValueError.

    Remembered for as long as no file changes.
    """
    files = [path] if path.is_file() else sorted({file for glob in _COUNTED for file in path.glob(glob)})
    if all(file.suffix in _NO_TENSORS for file in files):
        return None
    before = state(files)
    known = memo.recall(before)
    if known is None:
        known = _digest(files)
        if state(files) != before:
            raise OSError(f"{path} changes while it is read")
        memo.remember(before, known)
    return known


def state(files: list[Path]) -> tuple[tuple[str | int, ...], ...]:
    """Changes whenever one of the files does. Raises OSError."""
    found = [(file.name, file.stat()) for file in files]
    return tuple((name, s.st_dev, s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns) for name, s in found)


def _digest(files: list[Path]) -> str:
    total = hashlib.blake2b(digest_size=32, person=b"kvtier-weights-1")
    for file in files:
        total.update(f"{file.name}\0{file.stat().st_size}\0".encode())
        with file.open("rb") as stream:
            for piece in _samples(stream) if file.suffix == ".safetensors" else _whole(stream):
                total.update(piece)
    return total.hexdigest()


def _whole(stream: BinaryIO) -> Iterator[bytes]:
    while piece := stream.read(_READ_NBYTES):
        yield piece


def _samples(stream: BinaryIO) -> Iterator[bytes]:
    """The header, and of each tensor what `_spans` says. Raises ValueError for what is no safetensors file."""
    end = os.fstat(stream.fileno()).st_size
    begin = 8 + int.from_bytes(stream.read(8), "little")
    if begin > min(end, _LONGEST_HEADER):
        raise ValueError(f"a header that ends at byte {begin} of {end}")
    header = stream.read(begin - 8)
    yield header
    tensors = [(begin + at, begin + to) for at, to in _offsets(header)]
    if any(not begin <= at <= to <= end for at, to in tensors):
        raise ValueError("a tensor that does not lie in its file")
    pieces = max(_FEWEST_PIECES, min(_PIECES, _PIECES_OF_A_FILE // max(1, len(tensors))))
    spans = [span for at, to in tensors for span in _spans(at, to - at, pieces)]
    for at, nbytes in spans:  # the disk may fetch them in the order that suits it
        os.posix_fadvise(stream.fileno(), at, nbytes, os.POSIX_FADV_WILLNEED)
    for at, nbytes in spans:
        stream.seek(at)
        yield stream.read(nbytes)


def _offsets(header: bytes) -> list[_Span]:
    """Of each tensor behind the header, by name."""
    try:
        tensors = sorted(json.loads(header).items())
        offsets = [tensor["data_offsets"] for name, tensor in tensors if name != "__metadata__"]
        return [(index(at), index(to)) for at, to in offsets]
    except (AttributeError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"not the header of a safetensors file: {error!r}") from error


def _spans(at: int, nbytes: int, pieces: int) -> list[_Span]:
    """The whole tensor, or pieces from its first byte to its last."""
    if nbytes <= pieces * _PIECE_NBYTES:
        return [(at, nbytes)]
    step = (nbytes - _PIECE_NBYTES) / (pieces - 1)
    return [(at + round(i * step), _PIECE_NBYTES) for i in range(pieces)]
