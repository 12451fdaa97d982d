"""Models that kvtier serves in another way, or refuses with a reason."""

from __future__ import annotations

import json

import pytest
from latent_kernels import needs_amx, reuse_anyway
from real_engines import cpu, cpu_and_disk, hit, prompt
from sizes import some
from test_serving import forget


def hits_as_the_engines_own(engine, store, asked, options):
    """From memory, and from disk in a new engine: bit-equal to the engine's own prefix hit."""
    with engine(cpu_and_disk(store), **options) as first:
        first.ask(asked)
        (own,) = first.own_hits(asked)
        forget(first)
        first.outcomes()
        warm = first.ask(asked)[0]
        assert first.outcomes() == [hit(530, cpu=512)]
        first.assert_at_rest()
    with engine(cpu_and_disk(store), **options) as second:
        again = second.ask(asked)[0]
        assert second.outcomes() == [hit(530, disk=512)]
    assert own.cached == warm.cached == again.cached == 512
    assert warm.differs(own) == again.differs(own) == 0


@needs_amx
def test_latent_attention(engine, latent, tmp_path):
    """MLA: one page a layer, no heads. Its backend's own prefix hit is the only fair oracle."""
    options = {"model": latent, "dtype": "bfloat16", "enable_prefix_caching": True}
    hits_as_the_engines_own(engine, tmp_path, prompt(60, 530), options)


def test_a_hybrid_model_whose_layers_all_keep_every_token(engine, tmp_path):
    import tiny_hybrids

    tiny_hybrids.make("gemma3", tmp_path / "model")
    asked = prompt(61, 530)
    options = {"model": tmp_path / "model", "disable_hybrid_kv_cache_manager": True, "enable_prefix_caching": True}
    hits_as_the_engines_own(engine, tmp_path / "store", asked, options)


@pytest.mark.more
def test_another_dtype_or_block_size_is_another_namespace_and_trust_in_code_is_not(engine, model, tmp_path):
    asked = prompt(62, 530)
    cached = []
    for options in ({}, {"dtype": "bfloat16"}, {"block_size": 64}, {"trust_remote_code": True}):
        with engine(cpu_and_disk(tmp_path), **options) as served:
            cached.append(served.ask(asked)[0].cached)
    assert cached == [0, 0, 0, 512]


ROPES = {
    "default": {},
    "linear": {"factor": 2.0},
    "dynamic": {"factor": 2.0},
    "llama3": {
        "factor": 2.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 512,
    },
    "yarn": {"factor": 2.0, "original_max_position_embeddings": 1024},
}


@pytest.mark.parametrize("kind", some(ROPES))
def test_another_longest_sequence_has_the_same_kv(engine, tmp_path, kind):
    """Each engine computes it by itself first; then those of 2048 and 640 tokens find what that of 1024 has stored."""
    asked, rope = prompt(62, 530), {"rope_type": kind, "rope_theta": 1e4, **ROPES[kind]}
    options = {"hf_overrides": {"rope_parameters": rope}, "enable_prefix_caching": True}
    own = {}
    for longest in (1024, 2048, 640):
        with engine(cpu_and_disk(tmp_path / str(longest)), max_model_len=longest, **options) as alone:
            assert alone.ask(asked)[0].cached == 0
            (own[longest],) = alone.own_hits(asked)
    assert own[2048].differs(own[1024]) == own[640].differs(own[1024]) == 0
    for longest in (2048, 640):
        with engine(cpu_and_disk(tmp_path / "1024"), max_model_len=longest, **options) as other:
            answer = other.ask(asked)[0]
            assert other.outcomes() == [hit(530, disk=512)]
            assert answer.differs(own[1024]) == 0


def test_a_rope_that_depends_on_the_longest_sequence_is_cold_with_another_one(engine, tmp_path):
    asked, factors = prompt(63, 530), {"short_factor": [1.0] * 32, "long_factor": [4.0] * 32}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 1024, **factors}
    cached = []
    for longest in (1024, 2048, 1024):
        with engine(cpu_and_disk(tmp_path), max_model_len=longest, hf_overrides={"rope_parameters": rope}) as served:
            cached.append(served.ask(asked)[0].cached)
    assert cached == [0, 0, 512]


@pytest.mark.parametrize("kernel", ["CPU_ATTN", "CPU_MLA"])
def test_the_pages_themselves_come_back(engine, monkeypatch, latent, kernel):
    """Bytes, not answers: what a load puts into the engine's pages is what a store took out of them.

    With CPU_MLA, which gives other answers behind any prefix, there is no other oracle.
    """
    from kvtier_core.transfer.host_mover import HostMover

    taken, given = {}, {}

    def pages_of(mover, chunk):
        return {
            (layer.base, place): read(layer.base + block * layer.stride, layer.nbytes)
            for layer, its in zip(mover._cache.layers, mover._cache.layout.parts[0].shard_of(0).layers, strict=True)
            for place, block in enumerate(chunk[its.group])
        }

    def read(address, nbytes):
        import ctypes

        return ctypes.string_at(address, nbytes)

    store, load, finished = HostMover.store, HostMover.load, HostMover.finished
    loads = []

    def spy_store(mover, job, pages, slots):
        if job > 0:  # not of the self-test
            taken.update((slot, pages_of(mover, chunk)) for slot, chunk in zip(slots, pages, strict=True))
        store(mover, job, pages, slots)

    def spy_load(mover, job, slots, pages, after=None):
        if job > 0:
            loads.append((mover, slots, pages))
        load(mover, job, slots, pages, after)

    def spy_finished(mover):
        ended = finished(mover)
        if ended and loads:
            for mover, slots, pages in loads:
                given.update((slot, pages_of(mover, chunk)) for slot, chunk in zip(slots, pages, strict=True))
            loads.clear()
        return ended

    asked, options = prompt(63, 530), {}
    if kernel == "CPU_MLA":
        options = {"model": latent, "attention_backend": kernel}
        reuse_anyway(monkeypatch.setattr)
    with engine(cpu(), **options) as served:
        monkeypatch.setattr(HostMover, "store", spy_store)
        monkeypatch.setattr(HostMover, "load", spy_load)
        served.ask(asked)
        monkeypatch.setattr(HostMover, "finished", spy_finished)
        assert served.ask(asked)[0].cached == 512
    assert len(taken) == 8
    assert len({json.dumps(sorted(map(str, pages.values()))) for pages in taken.values()}) == 8, "all chunks alike"
    assert given == taken


def test_an_engine_on_a_device_without_a_mover_is_refused(engine, said, monkeypatch):
    from kvtier_cpu.config import CpuConfig

    monkeypatch.setattr(CpuConfig, "devices", ("cuda",))
    with engine(cpu()) as served:
        assert said()[-1] == "kvtier: this engine is not served: arena cpu has no mover for cpu yet"
        assert [served.ask(prompt(64, 530))[0].cached for _ in range(2)] == [0, 0]
