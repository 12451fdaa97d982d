"""A digest of the weights in a folder. Needs no torch.

By default it covers every byte of every file: several threads read pieces, and the digest is BLAKE3 over the BLAKE3
digests of the pieces. Sampling reads the header of each safetensors file, small tensors completely, and large ones at
places spread over them; it does not detect a change between those places.
"""

from __future__ import annotations

import functools
import json
import os
import re
from collections.abc import Iterator, Sequence
from operator import index
from pathlib import Path
from typing import BinaryIO

import attrs
from blake3 import blake3

from kvtier_core.identity import digest_cache
from kvtier_core.work.io_pool import IOPool, Outcome

_PIECE_NBYTES = 16 << 20
_MAX_THREADS = 16
#: Files that no weight loader reads.
_NEVER_LOADED = re.compile(r"(.*/)?(\..*|LICENSE(\.txt)?|.*\.md|.*\.png|.*\.jpe?g|.*\.gif|.*\.svg)|.*/\..*", re.DOTALL)
#: Files that hold no weights: a model's configuration and code.
_NO_TENSORS = (".json", ".py", ".txt", ".model", ".jinja")
_CODE = (".py", ".so")

#: Sampling reads this many pieces of this many bytes of a large tensor; fewer pieces in a file with very many tensors.
_SAMPLE_NBYTES = 4 << 10
_SAMPLES = 64
_MIN_SAMPLES = 3
_SAMPLES_OF_A_FILE = 1 << 15
_MAX_HEADER = 100_000_000  # bytes; what safetensors itself allows

_Span = tuple[int, int]  # offset and bytes


@attrs.frozen
class _Piece:
    file: Path
    offset: int
    nbytes: int

    def digest(self) -> bytes:
        """The digest of this piece. Called on a thread of the pool. Raises OSError."""
        buffer = bytearray(self.nbytes)
        with self.file.open("rb", buffering=0) as stream:
            stream.seek(self.offset)
            view = memoryview(buffer)
            while view and (count := stream.readinto(view)):
                view = view[count:]
        if view:
            raise OSError(f"{self.file} became shorter while it was read")
        return blake3(buffer).digest()


def digest(path: Path, *, sampled: bool = False) -> str | None:
    """The digest of a file or a folder of weights, as 64 hex digits; None if it holds no weights.

    It is cached until a file changes. A second process that asks for it meanwhile waits for the first. Raises OSError,
    also if a file changes meanwhile, and ValueError for a file that cannot be sampled.
    """
    files = loadable(path)
    if all(file.suffix in _NO_TENSORS for file in files):
        return None
    before = state(files)
    entry = digest_cache.Entry("weights, sampled" if sampled else "weights", before)
    with entry.alone():
        known = entry.recall()
        if known is None:
            known = _digest(path, files, sampled=sampled)
            if state(files) != before:
                raise OSError(f"{path} changes while it is read")
            entry.remember(known)
    return known


def code_digest(path: Path) -> str:
    """The digest of a file of code, or of all code in a folder, as 64 hex digits. Raises OSError."""
    files = sorted(each for each in path.rglob("*") if each.suffix in _CODE) if path.is_dir() else [path]
    return _digest(path, files, sampled=False)


def file_digest(file: Path) -> str:
    """The digest of the bytes of one file, as 64 hex digits. Raises OSError."""
    return _of_pieces([_pieces(file)])[0].hex()


def loadable(path: Path) -> list[Path]:
    """The file, or every file in the folder and below, except those that are known never to be loaded."""
    if path.is_file():
        return [path]
    found = (file for file in path.rglob("*") if not _NEVER_LOADED.fullmatch(str(file.relative_to(path))))
    return sorted(file for file in found if file.is_file())


def state(files: Sequence[Path]) -> tuple[tuple[str | int, ...], ...]:
    """A value that changes whenever one of the files does: one row per file, its change time last. Raises OSError."""
    found = [(str(file), file.stat()) for file in files]
    return tuple((name, s.st_dev, s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns) for name, s in found)


def _digest(path: Path, files: Sequence[Path], *, sampled: bool) -> str:
    total = blake3(b"kvtier-weights-2")
    to_read = [file for file in files if not (sampled and file.suffix == ".safetensors")]
    read = dict(zip(to_read, _of_pieces([_pieces(file) for file in to_read]), strict=True))
    for file in files:
        name = file.relative_to(path) if file != path else file.name
        total.update(f"{name}\0{file.stat().st_size}\0".encode())
        total.update(read[file] if file in read else _sampled(file))
    return total.hexdigest()


def _pieces(file: Path) -> list[_Piece]:
    end = file.stat().st_size
    return [_Piece(file, at, min(_PIECE_NBYTES, end - at)) for at in range(0, end, _PIECE_NBYTES)]


def _of_pieces(files: Sequence[Sequence[_Piece]]) -> list[bytes]:
    """For each file the digest of the digests of its pieces. Raises OSError."""
    found: dict[_Piece, Outcome] = {}
    pieces = [piece for file in files for piece in file]
    pool = IOPool("weights", max(1, min(_MAX_THREADS, len(os.sched_getaffinity(0)), len(pieces))))
    for piece in pieces:
        pool.submit_load(piece.digest, functools.partial(found.__setitem__, piece))
    try:
        while pool.jobs:
            pool.wait(1.0)
            pool.step()
            for outcome in found.values():
                if outcome.error is not None:
                    raise outcome.error
    finally:
        pool.close(1.0)
    return [blake3(b"".join(found[piece].value for piece in file)).digest() for file in files]


# -- sampling ----------------------------------------------------------------------------------------------


def _sampled(file: Path) -> bytes:
    """A digest of the samples of a file. Raises OSError, and ValueError if it is not a safetensors file."""
    total = blake3()
    with file.open("rb") as stream:
        for piece in _samples(stream):
            total.update(piece)
    return total.digest()


def _samples(stream: BinaryIO) -> Iterator[bytes]:
    """The header of a file, then the samples of each tensor. Raises ValueError if it is not a safetensors file."""
    end = os.fstat(stream.fileno()).st_size
    begin = 8 + int.from_bytes(stream.read(8), "little")
    if begin > min(end, _MAX_HEADER):
        raise ValueError(f"its header ends at byte {begin} of {end}")
    header = stream.read(begin - 8)
    yield header
    tensors = [(begin + at, begin + to) for at, to in _offsets(header)]
    if any(not begin <= at <= to <= end for at, to in tensors):
        raise ValueError("a tensor lies outside its file")
    samples = max(_MIN_SAMPLES, min(_SAMPLES, _SAMPLES_OF_A_FILE // max(1, len(tensors))))
    spans = [span for at, to in tensors for span in _spans(at, to - at, samples)]
    for at, nbytes in spans:  # so that the disk can read them in any order
        os.posix_fadvise(stream.fileno(), at, nbytes, os.POSIX_FADV_WILLNEED)
    for at, nbytes in spans:
        stream.seek(at)
        yield stream.read(nbytes)


def _offsets(header: bytes) -> list[_Span]:
    """The place of each tensor after the header, in the order of their names. Raises ValueError."""
    try:
        tensors = sorted(json.loads(header).items())
        offsets = [tensor["data_offsets"] for name, tensor in tensors if name != "__metadata__"]
        return [(index(at), index(to)) for at, to in offsets]
    except (AttributeError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"not a safetensors header: {error!r}") from error


def _spans(at: int, nbytes: int, samples: int) -> list[_Span]:
    """The pieces of a tensor to read: all of it, or some spread from its first byte to its last."""
    if nbytes <= samples * _SAMPLE_NBYTES:
        return [(at, nbytes)]
    step = (nbytes - _SAMPLE_NBYTES) / (samples - 1)
    return [(at + round(i * step), _SAMPLE_NBYTES) for i in range(samples)]
