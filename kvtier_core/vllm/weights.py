"""A digest of the weights in a folder, in seconds and without torch.

Every tensor of every safetensors file counts: small ones whole, large ones by three samples and their
place in the file. Other formats say nothing about where their tensors lie and are read whole.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

_SAMPLE_NBYTES = 16 << 10
_READ_NBYTES = 8 << 20
_OPAQUE = ("*.bin", "*.pt", "*.pth", "*.gguf")


def digest(path: Path) -> str | None:
    """Of a file or a folder of weights, as hex; None if there are none. Raises OSError, ValueError.

    Python files in the folder count too: they are the model's code.
    """
    if path.is_file():
        files = [path]
    else:
        files = sorted(path.glob("*.safetensors")) or sorted(f for glob in _OPAQUE for f in path.glob(glob))
    if not files:
        return None
    total = hashlib.blake2b(digest_size=32)
    for file in [*files, *(sorted(path.glob("*.py")) if path.is_dir() else ())]:
        total.update(f"{file.name}\0{file.stat().st_size}\0".encode())
        with file.open("rb") as stream:
            for piece in _tensor_samples(stream) if file.suffix == ".safetensors" else _whole(stream):
                total.update(piece)
    return total.hexdigest()


def _whole(stream: BinaryIO) -> Iterator[bytes]:
    while piece := stream.read(_READ_NBYTES):
        yield piece


def _tensor_samples(stream: BinaryIO) -> Iterator[bytes]:
    header_nbytes = int.from_bytes(stream.read(8), "little")
    header = stream.read(header_nbytes)
    yield header
    for name, tensor in sorted(json.loads(header).items()):
        if name == "__metadata__":
            continue
        begin, end = (8 + header_nbytes + offset for offset in tensor["data_offsets"])
        if end - begin <= 3 * _SAMPLE_NBYTES:
            spans = [(begin, end - begin)]
        else:
            middle = (begin + end) // 2
            spans = [(at, _SAMPLE_NBYTES) for at in (begin, middle, end - _SAMPLE_NBYTES)]
        for at, nbytes in spans:
            stream.seek(at)
            yield stream.read(nbytes)
