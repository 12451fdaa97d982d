"""Real vLLM over preallocated slabs: alone, and below a `cpu` tier, one engine after the other."""

from __future__ import annotations

from real_engines import cpu, hit, prompt


def slabs(tmp_path, **settings):
    return {"type": "gds", "paths": [str(tmp_path / name) for name in "ab"], "capacity": "64MiB", **settings}


def test_frames_of_a_slab_stack_are_served_below_a_cpu_tier(engine, said, tmp_path):
    """Bit-equal to the engine's own prefix hit of the same length."""
    asked = prompt(5, 530)
    alone = {**cpu(), "tiers": [slabs(tmp_path, staging="64MiB")]}
    with engine(alone, enable_prefix_caching=True) as first:
        first.ask(asked)
        (own,) = first.own_hits(asked)
        first.assert_at_rest()
    said()
    below = cpu()
    below["tiers"].append(slabs(tmp_path))
    with engine(below, enable_prefix_caching=True) as second:
        warm = second.ask(asked)[0]
        lines = said()
        assert second.outcomes() == [hit(530, gds=512)]
        why = "frames of gds pass through an arena: rank 0: kv_connector_extra_config: $.tiers[1]: "
        assert any(why + "the engine does not run on a GPU" in line for line in lines)
        second.assert_at_rest()
    assert (own.cached, warm.cached) == (512, 512)
    assert warm.differs(own) == 0
