"""Before anything is loaded, random bytes go to a slot and back. What is wrong with the copies is found there."""

from __future__ import annotations

import random

import attrs
import numpy as np
import pytest
import torch
from chunk_files import chunk_files
from real_engines import cpu, cpu_and_disk, miss, prompt
from test_serving import NOISE

from kvtier_core.engine.worker.self_test import try_copies
from kvtier_core.interfaces import PagedKVCache, PageRun
from kvtier_core.transfer.copier import PlainCopier
from kvtier_core.transfer.host_mover import HostMover
from kvtier_testing.samples import make_layout
from kvtier_vllm import layout

BLOCKS, CHUNK_BLOCKS = 9, 3
LAYOUT = make_layout((64, 64, 32), CHUNK_BLOCKS)


class Rig:
    """Three layers of pages, one of them cut into kernel blocks and one shared by two names, and a mover over them."""

    def __init__(self, blocks=BLOCKS):
        self.blocks = blocks
        # With a page to spare at the end, so that a wrong address does not lead out of the memory.
        self.first = torch.rand(blocks + 1, 2, 8)[:-1]  # pages of 64 bytes
        self.padded = torch.rand(blocks + 1, 20)[:-1, :16]
        self.cut = torch.rand(2 * blocks + 2, 8).to(torch.bfloat16)[:-2]  # 2 rows of 16 bytes a block
        self.caches = {"a": self.first, "b": self.padded, "c": self.cut, "d": self.first}
        self.slots = memoryview(bytearray(2 * LAYOUT.frame_nbytes))

    def kv_cache(self, **changes):
        layers = (
            PageRun(self.first.data_ptr(), 64, 64),
            PageRun(self.padded.data_ptr(), 80, 64),
            PageRun(self.cut.data_ptr(), 32, 32),
        )
        return PagedKVCache(
            **{"layers": layers, "blocks": self.blocks, "device": "cpu", "rank": 0, "layout": LAYOUT, **changes}
        )

    def verdict(self, kv_cache=None):
        mover = HostMover(kv_cache or self.kv_cache(), self.slots, LAYOUT.frame_nbytes, PlainCopier)
        try:
            return try_copies(mover, self.kv_cache(), [self.caches], slots=[1])
        finally:
            mover.close()


@pytest.mark.parametrize("blocks", [1, 2, 3, 4, BLOCKS])
def test_pages_with_the_assumed_layout_pass_and_are_put_back(blocks):
    rig = Rig(blocks)
    before = {name: cache.clone() for name, cache in rig.caches.items()}
    assert rig.verdict() == ""
    assert all(torch.equal(cache, before[name]) for name, cache in rig.caches.items())


def test_the_self_test_draws_from_generators_of_its_own():
    """The engine samples from those of Python, torch and numpy."""
    rig, states = Rig(), random_states()
    assert rig.verdict() == ""
    assert random_states() == states


def random_states():
    return random.getstate(), tuple(torch.get_rng_state().tolist()), repr(np.random.get_state())


@pytest.mark.parametrize(
    "layer, change",
    [
        (0, {"base": 64}),  # a page further on
        (1, {"stride": 64}),  # padding overlooked
        (2, {"stride": 16, "nbytes": 16}),  # one of two kernel blocks
        (2, {"base": 16}),
    ],
)
def test_pages_with_another_layout_are_found(layer, change):
    rig = Rig()
    wrong = list(rig.kv_cache().layers)
    moved = {"base": wrong[layer].base + change.pop("base", 0), **change}
    wrong[layer] = attrs.evolve(wrong[layer], **moved)
    nbytes = tuple(run.nbytes for run in wrong)
    kv_cache = rig.kv_cache(layers=tuple(wrong), layout=make_layout(nbytes, CHUNK_BLOCKS))
    assert "of layer" in rig.verdict(kv_cache)


def test_a_mover_that_does_nothing_is_found(monkeypatch):
    for way in ("gather", "scatter"):
        monkeypatch.setattr(PlainCopier, way, lambda self, rows, slots: ())
    assert Rig().verdict().startswith("a load did not restore block ")


def test_a_store_that_writes_into_pages_is_found(monkeypatch):
    monkeypatch.setattr(PlainCopier, "gather", PlainCopier.scatter)
    assert Rig().verdict().startswith("a store changed block ")


# -- in a real engine ----------------------------------------------------------------------------------------


def test_seeded_sampling_is_what_it_is_without_kvtier(engine):
    from vllm import SamplingParams

    def sampled(served):
        asked = [{"prompt_token_ids": prompt(94 + number, 40)} for number in range(2)]
        sampling = SamplingParams(temperature=1.0, max_tokens=12, detokenize=False, ignore_eos=True)
        return [answer.outputs[0].token_ids for answer in served.llm.generate(asked, sampling, use_tqdm=False)]

    with engine(seed=7) as plain:
        expected = sampled(plain)
        assert sampled(plain) != expected, "it is not sampled"
    with engine(cpu(), seed=7) as served:
        assert sampled(served) == expected


def test_the_self_test_is_over_before_the_first_request(engine, said):
    """vLLM steps as long as its scheduler says that there is something to do, as its engine's loop does."""
    with engine(cpu()) as served:
        core = served.llm.llm_engine.engine_core.engine_core
        said()
        while served.scheduler.has_requests():
            core.step_fn()
        assert "kvtier: self-test: every byte came back; kvtier is ready" in said()


def test_an_engine_with_another_layout_is_caught_before_traffic(engine, said, monkeypatch, tmp_path):
    """As if a minor release had put something between the pages: the addresses are wrong, nothing else notices."""
    asked = prompt(90, 530)
    stack = cpu_and_disk(tmp_path)
    stack["tiers"][1]["eviction"] = "lru"  # it learns nothing, so that there are frames of chunks and no others
    with engine(stack) as served:
        said()
        truth = served.ask(asked)[0]
        assert "kvtier: self-test: every byte came back; kvtier is ready" in said()
    page_run = layout._page_run

    def one_page_off(cache, blocks):
        run = page_run(cache, blocks)
        return attrs.evolve(run, base=run.base + run.stride // 2)

    monkeypatch.setattr(layout, "_page_run", one_page_off)
    with engine(stack) as served:  # its disk is warm, and its identity the same
        said()
        answers = [served.ask(asked)[0] for _ in range(2)]
        lines = said()
        served.ask(prompt(93, 530))
        served.settle()
        assert len(chunk_files(tmp_path)) == 8  # those of the first engine
    alarm = [line for line in lines if "self-test failed" in line]
    assert alarm[0].startswith("kvtier: the self-test failed: rank 0: arena cpu: a load did not restore block ")
    assert alarm[0].endswith("Nothing is stored or loaded.")
    assert [answer.cached for answer in answers] == [0, 0]
    assert all(answer.differs(truth) < NOISE for answer in answers)


def test_pages_whose_first_dimension_is_not_blocks_are_refused(engine, said, monkeypatch):
    from kvtier_vllm.connector import KVTierConnector

    register = KVTierConnector.register_kv_caches

    def transposed(self, caches):
        register(self, {name: cache.transpose(0, 1) for name, cache in caches.items()})

    monkeypatch.setattr(KVTierConnector, "register_kv_caches", transposed)
    with engine(cpu()) as served:
        assert said()[-1].endswith("are not stored block by block")
        assert [served.ask(prompt(91, 530))[0].cached for _ in range(2)] == [0, 0]


def test_an_arena_that_cannot_be_reached_is_reported_and_not_used(engine, said, monkeypatch):
    from kvtier_cpu.config import CpuConfig

    monkeypatch.setattr(CpuConfig, "attach", lambda self, handle, table: 1 / 0)
    with engine(cpu()) as served:
        assert [served.ask(prompt(92, 530))[0].cached for _ in range(2)] == [0, 0]
        told = "plugin kvtier-cpu:cpu 0.1.0 cannot attach to tier cpu: ZeroDivisionError: division by zero"
        why = f"the self-test failed: rank 0: ConfigError: kv_connector_extra_config: $.tiers[0]: {told}"
        assert f"kvtier: {why}. Nothing is stored or loaded." in said()
        assert served.outcomes()[1] == miss(530, why)
        served.assert_at_rest()
