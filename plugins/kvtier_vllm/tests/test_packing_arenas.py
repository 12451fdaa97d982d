"""Real vLLM in this process whose arena packs: what it holds, and what tiers below it store, is a quarter shorter."""

from __future__ import annotations

import json
import shutil
import tempfile
import time

import pytest
import torch
from patience import HANG
from real_engines import cpu, cpu_and_disk, hit, miss, prompt
from safetensors.torch import load_file, save_file
from sizes import some
from test_direct_loads import slabs
from test_processes import largest_difference, run
from test_server import of, serving

ASKED = prompt(64, 530)
RAW_NBYTES = 8 * (4096 + (128 << 10))  #: of the frames of its chunks
PACKED = {"packing": "auto"}


def packing(stack):
    stack["tiers"][0].update(PACKED)
    return stack


@pytest.fixture
def own(engine):
    """The engine's answer from its own prefix cache."""
    with engine(cpu(), enable_prefix_caching=True, dtype="bfloat16") as alone:
        alone.ask(ASKED)
        (answer,) = alone.own_hits(ASKED)
    assert answer.cached == 512
    return answer


def stacks(tmp_path):
    disk = cpu_and_disk(tmp_path)
    encoded = cpu_and_disk(tmp_path)
    encoded["tiers"][1]["serializer"] = "packed"
    shared = cpu_and_disk(tmp_path)
    shared["tiers"][1]["shared"] = True
    read = {**cpu(), "tiers": [*cpu()["tiers"], slabs(tmp_path, mode="gds")]}
    return {"disk": disk, "encoded": encoded, "shared": shared, "gds": read}


@pytest.mark.parametrize("below", some(["disk", "encoded", "shared", "gds"], "disk", "gds"))
def test_hits_from_the_arena_and_from_below_are_bit_equal(engine, said, tmp_path, own, below):
    """From frames that are stored as they lie in the slots, or encoded once more, or read by the workers."""
    stack = packing(stacks(tmp_path)[below])
    with engine(stack, enable_prefix_caching=False, dtype="bfloat16") as first:
        first.ask(ASKED)
        assert first.ask(ASKED)[0].differs(own) == 0
        assert first.outcomes()[1] == hit(530, cpu=512)
        first.settle()
        arena, store = first.manager.usage()
        assert arena.chunks == store.chunks == 8
        assert arena.nbytes < 0.85 * RAW_NBYTES and store.nbytes < 0.85 * RAW_NBYTES
        assert any("; packing on" in line for line in said())
    with engine(stack, enable_prefix_caching=False, dtype="bfloat16") as second:
        warm = second.ask(ASKED)[0]
        name = stack["tiers"][1]["type"]
        assert second.outcomes() == [hit(530, **{name: 512})]
        second.assert_at_rest()
    assert warm.differs(own) == 0


def test_frames_of_an_unpacked_arena_are_a_miss(engine, tmp_path, own):
    with engine(cpu_and_disk(tmp_path), dtype="bfloat16") as first:
        first.ask(ASKED)
        first.settle()
    with engine(packing(cpu_and_disk(tmp_path)), enable_prefix_caching=False, dtype="bfloat16") as second:
        second.ask(ASKED)
        second.settle()
        assert second.ask(ASKED)[0].differs(own) == 0


def test_other_kv_than_that_of_bfloat16_is_not_packed(engine, said):
    with engine(packing(cpu()), enable_prefix_caching=False, dtype="float32") as served:
        served.ask(ASKED)
        served.ask(ASKED)
        assert served.outcomes()[1] == hit(530, cpu=512)
    assert "kvtier: packing: auto -> off: not all KV is in bfloat16" in said()


@pytest.mark.more
def test_a_server_packs(engine, tmp_path, own):
    """And its workers read packed frames from its slabs."""
    of_server, options = of(tmp_path), {"enable_prefix_caching": False, "dtype": "bfloat16"}
    store = json.dumps(slabs(tmp_path, mode="gds"))
    with serving(tmp_path, store, packing="auto"), engine(of_server, **options) as first:
        first.ask(ASKED)
        assert first.ask(ASKED)[0].differs(own) == 0
        assert first.outcomes()[1] == hit(530, cpu=512)
        first.assert_at_rest()
    with serving(tmp_path, store, packing="auto"), engine(of_server, **options) as second:
        assert second.ask(ASKED)[0].differs(own) == 0
        assert second.outcomes() == [hit(530, gds=512)]
        second.assert_at_rest()


@pytest.mark.more
def test_kept_memory_is_packed(engine, tmp_path, own):
    """The next server adopts it; one that packs no more begins with empty memory."""
    options = {"enable_prefix_caching": False, "dtype": "bfloat16"}
    with tempfile.TemporaryDirectory(dir="/dev/shm") as keep:
        for packing, kept in [("auto", False), ("auto", True), ("off", False), ("auto", True)]:
            with serving(tmp_path, keep=keep, packing=packing), engine(of(tmp_path), **options) as served:
                deadline = time.monotonic() + HANG
                while True:  # until what is kept was verified
                    answer = served.ask(ASKED)[0]
                    if not kept or served.outcomes()[-1] == hit(530, cpu=512):
                        break
                    assert time.monotonic() < deadline, "what was in memory is not found"
                assert kept or served.outcomes() == [miss(530)]
                assert not kept or answer.differs(own) == 0
                served.assert_at_rest()


@pytest.mark.more
def test_two_ranks_pack_shards_of_their_own(fork_server, model, tmp_path):
    """In processes of their own. What they load is what two ranks load that do not pack."""
    options = {"dtype": "bfloat16", "tensor_parallel_size": 2, "at_once": False}
    _, truth, _, _ = run(fork_server, model, cpu_and_disk(tmp_path / "raw"), **options)
    stack = packing(cpu_and_disk(tmp_path / "packed"))
    _, warm, _, log = run(fork_server, model, stack, **options)
    disk, again, told, _ = run(fork_server, model, stack, **options)
    assert "; packing on" in log
    assert told[:2] == [hit(530, disk=512)] * 2
    assert [largest_difference(each, truth) for each in (warm, disk, again)] == [0, 0, 0]


@pytest.fixture
def with_wide_keys_and_values(model, tmp_path):
    """A model whose channels differ by so many powers of two that hardly any tile packs."""
    folder = tmp_path / "wide"
    shutil.copytree(model, folder)
    weights = load_file(folder / "model.safetensors")
    for name in weights:
        if name.endswith(("k_proj.weight", "v_proj.weight")):
            rows = torch.arange(len(weights[name])) * 7 % 64
            weights[name] *= torch.exp2(-rows.to(weights[name].dtype))[:, None]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_chunks_that_do_not_fit_are_not_stored_and_counted(engine, said, with_wide_keys_and_values):
    options = {"model": with_wide_keys_and_values, "enable_prefix_caching": False, "dtype": "bfloat16"}
    with engine(None, **options) as alone:
        truth = alone.ask(ASKED)[0]
    with engine(packing(cpu()), **options) as served:
        assert [answer.differs(truth) for answer in served.ask(ASKED) + served.ask(ASKED)] == [0, 0]
        assert served.outcomes() == [miss(530), miss(530)]
        served.assert_at_rest()
        (arena,) = served.manager.usage()
        assert arena.chunks == 0
    assert any("rejected 16" in line for line in said()), "each time eight chunks"
