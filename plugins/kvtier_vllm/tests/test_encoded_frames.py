"""Real vLLM in this process over a disk whose frames are encoded, losing no bit."""

from __future__ import annotations

import pytest
from real_engines import cpu_and_disk, hit, prompt


@pytest.mark.parametrize(
    ("serializer", "dtype", "share"),
    [("packed", "bfloat16", 0.85), ("packed", "float32", 1.02), ("zstd", "bfloat16", 0.8), ("zstd", "float32", 0.95)],
)
def test_a_hit_from_encoded_frames_is_bit_equal(engine, tmp_path, serializer, dtype, share):
    """Whatever the KV is. Each frame has a header, too."""
    stack, asked = cpu_and_disk(tmp_path), prompt(63, 530)
    stack["tiers"][1]["serializer"] = serializer
    with engine(stack, enable_prefix_caching=True, dtype=dtype) as first:
        first.ask(asked)
        (own,) = first.own_hits(asked)
        first.settle()
        arena, disk = first.manager.usage()
        assert arena.chunks == disk.chunks == 8
        assert disk.nbytes < share * arena.nbytes
    with engine(stack, enable_prefix_caching=True, dtype=dtype) as second:
        warm = second.ask(asked)[0]
        assert second.outcomes() == [hit(530, disk=512)]
        second.assert_at_rest()
    assert warm.differs(own) == 0
