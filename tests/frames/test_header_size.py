"""The size of a frame's header is a name of its own: a longer header moves every payload, and no alignment."""

from __future__ import annotations

import subprocess
import sys

ROUND_TRIP = """
from kvtier_core import types
types.FRAME_HEADER_NBYTES = 2 * types.FRAME_ALIGNMENT  # before anything else reads it

from kvtier_core.frames.format import expected_header, payload_of, seal_part, shard_checksums_of, verify
from kvtier_testing.samples import make_keys, make_layout, make_namespace

layout, (key,) = make_layout(ranks=2), make_keys(1)
(part,) = layout.parts
assert part.shards[0].offset == 8192 and part.frame_nbytes == 8192 + -(-part.payload_nbytes // 4096) * 4096
frame = memoryview(bytearray(b"\\x5a" * part.frame_nbytes))
seal_part(frame, make_namespace(), key, part)
assert verify(frame, make_namespace(), key, payload_nbytes=part.payload_nbytes) is None
assert payload_of(frame) == b"\\x5a" * part.payload_nbytes
assert bytes(frame[4096:8192]) == bytes(4096)
assert len(shard_checksums_of(frame)) == 2
"""


def test_a_longer_header_moves_the_payload_and_keeps_the_alignment():
    subprocess.run([sys.executable, "-c", ROUND_TRIP], check=True)
