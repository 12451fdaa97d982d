"""Files of weights of any bytes: a digest, an OSError or a ValueError, and no more memory than the file has bytes."""

from __future__ import annotations

import contextlib
import json

import atheris
import harness

with atheris.instrument_imports(include=["kvtier_core", "json"]):
    from kvtier_core.identity import weights

FILE = harness.new_folder("input") / "model.safetensors"
HEADERS = [
    {"__metadata__": {"format": "pt"}, "a": {"dtype": "F32", "shape": [5, 2], "data_offsets": [0, 40]}},
    {"a": {"data_offsets": [0, 1 << 40]}, "b": {"data_offsets": [-1, 1 << 64]}},
    [{"a": None}],
]


def one_input(data: bytes) -> None:
    """The first 8 bytes are the length of the header, or zeros where it shall fit."""
    claimed, header = data[:8], data[8:]
    FILE.write_bytes((len(header).to_bytes(8, "little") if claimed == bytes(8) else claimed) + header)
    with contextlib.suppress(OSError, ValueError):
        assert len(weights.digest(FILE, sampled=True)) == 64


if __name__ == "__main__":
    texts = [json.dumps(header).encode() for header in HEADERS]
    harness.fuzz(
        one_input,
        [bytes(8) + text for text in texts] + [len(text).to_bytes(8, "little") + text + bytes(64) for text in texts],
        longest=1024,
        words=[b"__metadata__", b'"data_offsets"', b"null", b"1e9", b"NaN", b"\xff" * 8],
    )
