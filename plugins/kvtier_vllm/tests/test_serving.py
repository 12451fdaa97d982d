"""Real vLLM in this process. The oracle is the engine itself: its own prefix cache, or none at all.

A hit and vLLM's own prefix hit of the same length compute the same tokens in the same shapes, so their
log-probabilities are equal to the last bit; a single wrong byte of KV is not.
"""

from __future__ import annotations

import pytest
from real_engines import BLOCK, CHUNK, cpu, cpu_and_disk, hit, miss, prompt

from kvtier_core.engine.scheduler.waiting import Waiting
from kvtier_core.identity import weights

COLD = "kvtier: cold because disk holds another namespace: "

#: A prompt split differently is added up in another order: float32 noise, far below any real difference.
NOISE = 1e-3


def forget(engine):
    """Empty the engine's own prefix cache, so that only kvtier can answer."""
    assert engine.llm.reset_prefix_cache()


def test_a_hit_is_bit_equal_to_the_engines_own_prefix_hit(engine):
    asked = prompt(1, 530)
    with engine(cpu(), enable_prefix_caching=True) as served:
        cold = served.ask(asked)[0]
        (own,) = served.own_hits(asked)
        forget(served)
        served.outcomes()
        warm = served.ask(asked)[0]
        assert served.outcomes() == [hit(530, cpu=512)]
        served.assert_at_rest()
    assert (cold.cached, own.cached, warm.cached) == (0, 512, 512)
    assert warm.differs(own) == 0
    assert warm.differs(cold) < NOISE


@pytest.mark.more
def test_without_the_engines_prefix_cache(engine):
    asked = prompt(1, 530)
    with engine() as plain:
        truth = plain.ask(asked)[0]
    with engine(cpu()) as served:
        cold, warm = served.ask(asked)[0], served.ask(asked)[0]
        served.assert_at_rest()
    assert (cold.cached, warm.cached) == (0, 512)
    assert cold.differs(truth) == 0
    assert warm.differs(truth) < NOISE


def test_a_second_prompt_hits_what_the_first_has_just_stored(engine):
    shared = prompt(2, 512)
    first, second = prompt(3, 530, shared), prompt(4, 530, shared)
    with engine() as plain:
        truth = plain.ask(first, second)
    with engine(cpu(), max_num_batched_tokens=530, max_num_seqs=2) as served:  # the first fills a step
        answers = served.ask(first, second)
        assert served.outcomes() == [miss(530), hit(530, cpu=512)]
        served.assert_at_rest()
    assert [answer.cached for answer in answers] == [0, 512]
    assert max(a.differs(t) for a, t in zip(answers, truth, strict=True)) < NOISE


def test_a_new_engine_is_served_from_disk_and_then_from_memory(engine, tmp_path):
    asked = prompt(5, 530)
    with engine(cpu_and_disk(tmp_path), enable_prefix_caching=True) as first:
        first.ask(asked)
        (own,) = first.own_hits(asked)
    with engine(cpu_and_disk(tmp_path), enable_prefix_caching=True) as second:
        warm = second.ask(asked)[0]
        assert second.outcomes() == [hit(530, disk=512)]
        forget(second)
        again = second.ask(asked)[0]
        assert second.outcomes() == [hit(530, cpu=512)]
        second.assert_at_rest()
    assert warm.differs(own) == again.differs(own) == 0


@pytest.mark.more
def test_part_from_memory_and_part_from_disk(engine, tmp_path):
    shared = prompt(6, 256)
    short, long = prompt(7, 260, shared), prompt(8, 530, shared)
    with engine(cpu_and_disk(tmp_path)) as first:
        truth = first.ask(long)[0]
    with engine(cpu_and_disk(tmp_path)) as second:
        second.ask(short)
        second.outcomes()
        mixed = second.ask(long)[0]
        assert second.outcomes() == [hit(530, cpu=256, disk=256)]
    assert mixed.differs(truth) < NOISE


def test_the_engines_own_hit_may_end_inside_a_chunk(engine):
    """The engine has the first 32-token block, kvtier both halves of the chunk: only the rest is loaded."""
    asked = prompt(9, 530)
    with engine(cpu(), enable_prefix_caching=True) as served:
        served.ask(asked)
        (own,) = served.own_hits(asked)
        forget(served)
        served.ask(asked[:40])  # less than a chunk: kvtier has nothing for it, the engine keeps one block
        served.outcomes()
        warm = served.ask(asked)[0]
        assert served.outcomes() == [hit(530, engine_had=32, cpu=480)]
    assert warm.differs(own) == 0


def test_a_prompt_that_is_hit_to_its_last_token(engine):
    asked = prompt(10, 512)
    with engine(cpu(), enable_prefix_caching=True) as served:
        cold = served.ask(asked)[0]
        forget(served)
        served.outcomes()
        warm = served.ask(asked)[0]
        assert served.outcomes() == [hit(512, cpu=512)]
        served.assert_at_rest()
    assert warm.differs(cold) < NOISE


def test_chunked_prefill(engine):
    asked = prompt(11, 1000)
    with engine() as plain:
        truth = plain.ask(asked)[0]
    with engine(cpu(), max_num_batched_tokens=160, max_num_seqs=2) as served:
        cold = served.ask(asked)[0]
        served.outcomes()
        warm = served.ask(asked)[0]
        assert served.outcomes() == [hit(1000, cpu=960)]
        served.assert_at_rest()
    assert cold.differs(truth) < NOISE
    assert warm.differs(truth) < NOISE


@pytest.mark.parametrize("save_decode, cached", [(False, 64), (True, 128)])
def test_generated_tokens_are_kept_only_if_asked(engine, save_decode, cached):
    asked = prompt(12, 100)
    with engine(cpu(save_decode=save_decode)) as served:
        answer = served.ask(asked, tokens=40)[0]
        again = served.ask([*asked, *answer.tokens], tokens=1)[0]
    assert again.cached == cached


@pytest.mark.more
def test_preempted_requests_resume_with_what_they_generated(engine):
    asked = [prompt(20 + i, 200) for i in range(4)]
    with engine() as plain:
        truth = plain.ask(*asked, tokens=70)
    # 4 requests grow from 200 to 270 tokens, 7 to 9 blocks each, and there are 31.
    stack = cpu(save_decode=True, chunk_tokens=BLOCK)
    with engine(stack, num_gpu_blocks_override=32, max_num_seqs=4, max_model_len=512) as served:
        answers = served.ask(*asked, tokens=70)
        resumed = [outcome for outcome in served.outcomes() if outcome.loaded > 200]
        assert resumed, "nobody was preempted, or nobody resumed with generated tokens"
        served.assert_at_rest()
    assert max(a.differs(t) for a, t in zip(answers, truth, strict=True)) < NOISE


@pytest.mark.more
def test_requests_whose_loads_hold_all_blocks_make_progress(engine, tmp_path):
    """There are 63 blocks. A prompt needs 29, which it holds while it waits for its load, and grows to 32."""
    asked = [prompt(40 + i, 450) for i in range(8)]
    small, large = (cpu_and_disk(tmp_path, capacity, chunk_tokens=BLOCK) for capacity in ("4MiB", "64MiB"))
    with engine() as plain:
        truth = plain.ask(*asked * 4, tokens=50)
    with engine(large, max_model_len=512) as stores:
        stores.ask(*asked, tokens=1)
    with engine(small, num_gpu_blocks_override=64, max_num_seqs=16, max_model_len=512) as served:
        answers = served.ask(*asked * 4, tokens=50)
        assert len([outcome for outcome in served.outcomes() if outcome.loaded > 400]) >= 32
        served.assert_at_rest()
    assert max(a.differs(t) for a, t in zip(answers, truth, strict=True)) < NOISE


def test_another_salt_does_not_hit(engine):
    asked = prompt(30, 530)
    with engine(cpu()) as served:
        cached = [served.ask(asked, salt=salt)[0].cached for salt in (None, "alice", "bob", "alice", None)]
    assert cached == [0, 0, 0, 512, 512]


def test_other_weights_in_the_same_folder_do_not_hit(engine, said, tmp_path):
    """Other in a single row of the embedding, which sampling does not see."""
    import tiny_llama
    from safetensors.torch import load_file, save_file

    asked = prompt(31, 530)
    assert 971 in asked
    folder, store = tmp_path / "model", tmp_path / "store"
    tiny_llama.make(folder)
    file = folder / "model.safetensors"
    tensors, sampled = load_file(file), weights.digest(folder, sampled=True)
    cached, cold = [], []
    for scale in (1, 2, 1):
        embedding = tensors["model.embed_tokens.weight"].clone()
        embedding[971] *= scale
        save_file({**tensors, "model.embed_tokens.weight": embedding}, file, metadata={"format": "pt"})
        assert weights.digest(folder, sampled=True) == sampled
        said()
        with engine(cpu_and_disk(store), model=folder) as served:
            cached.append(served.ask(asked)[0].cached)
        cold.append([line for line in said() if line.startswith(COLD)])
    assert cached == [0, 0, 512]
    assert [len(lines) for lines in cold] == [0, 1, 0]
    assert cold[1][0].startswith(f"{COLD}weights ")


@pytest.mark.more
def test_an_arena_smaller_than_the_prompt(engine):
    asked = prompt(32, 1000)
    with engine() as plain:
        truth = plain.ask(asked)[0]
    frame = 4096 + 4 * 2 * 2 * 64 * 64 * 4  # layers, keys and values, heads, head size, tokens, float32
    with engine(cpu(f"{6 * frame}B")) as served:
        answers = [served.ask(asked)[0] for _ in range(3)]
        served.assert_at_rest()
    assert all(0 <= answer.cached <= 6 * CHUNK for answer in answers)
    assert max(answer.differs(truth) for answer in answers) < NOISE


@pytest.mark.parametrize("slots", [6, 14])
def test_a_stored_prompt_longer_than_the_arena_is_loaded_without_a_wait_for_the_rest(
    engine, said, tmp_path, monkeypatch, slots
):
    asked, allows, awaited = prompt(33, 15 * CHUNK + 3), Waiting.allows, []
    with engine(cpu_and_disk(tmp_path)) as first:
        truth = first.ask(asked)[0]
    monkeypatch.setattr(
        Waiting, "allows", lambda self, state, found: awaited.append(found) or allows(self, state, found)
    )
    frame = 4096 + 4 * 2 * 2 * 64 * CHUNK * 4
    with engine(cpu_and_disk(tmp_path, f"{slots * frame}B")) as served:
        answer = served.ask(asked)[0]
        assert served.outcomes() == [hit(len(asked), disk=slots * CHUNK)]
        served.assert_at_rest()
    assert answer.differs(truth) < NOISE and answer.cached == slots * CHUNK
    assert awaited and {found.chunks + found.pending for found in awaited if found.pending} == {slots}
    assert any(f"; cpu is too small for {15 - slots} more of this prompt's chunks), " in line for line in said())


def new_weights(served):
    """As a trainer does it: other weights in the running engine, and all caches reset."""
    model = served.llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.get_model()
    for weight in model.parameters():
        weight.data.mul_(1.25)
    return served.llm.llm_engine.reset_prefix_cache(reset_connector=True)


def test_new_weights_in_a_running_engine_open_an_epoch(engine, tmp_path):
    asked = prompt(33, 530)
    with engine() as plain:
        assert new_weights(plain)
        truth = plain.ask(asked)[0]
    stack = cpu_and_disk(tmp_path)
    stack["tiers"][1]["eviction"] = "lru"  # it learns nothing, so that there are frames of chunks and no others
    with engine(stack) as served:
        old = served.ask(asked)[0]
        served.settle()
        before = set(tmp_path.rglob("*.kv"))
        assert len(before) == 8
        assert new_weights(served)
        served.settle()
        assert not list(tmp_path.rglob("*.kv"))
        cold, warm = served.ask(asked)[0], served.ask(asked)[0]
        served.settle()
        assert not before & set(tmp_path.rglob("*.kv"))
    assert [answer.cached for answer in (old, cold, warm)] == [0, 0, 512]
    assert cold.differs(truth) == 0 and warm.differs(truth) < NOISE < old.differs(truth)
    assert not list(tmp_path.rglob("*.kv"))  # weights that no file has: no other process could tell what these are
    with engine(stack) as restarted:
        again = restarted.ask(asked)[0]
    assert (again.cached, again.differs(old)) == (0, 0)


def test_an_earlier_frame_is_not_served_even_if_it_could_not_be_deleted(engine, tmp_path):
    """As in a store that others share: it is asked for what the index does not know."""
    asked, stack = prompt(34, 530), cpu_and_disk(tmp_path)
    stack["tiers"][1]["shared"] = True
    with engine(stack) as served:
        served.ask(asked)
        served.settle()
        assert new_weights(served)
        served.settle()
        assert len(list(tmp_path.rglob("*.kv"))) == 8
        served.manager.tiers[0].remote.absent._ends.clear()  # as a second later: the store is asked again
        assert served.ask(asked)[0].cached == 0


def test_a_request_under_way_when_the_weights_change_is_not_kept(engine):
    """What it has computed is of the old weights, and what follows stands on that."""
    from vllm import SamplingParams

    asked = prompt(35, 530)
    with engine(cpu(), max_num_batched_tokens=128, max_num_seqs=2) as served:
        llm = served.llm.llm_engine
        sampling = SamplingParams(temperature=0, max_tokens=1, detokenize=False)
        llm.add_request("1", {"prompt_token_ids": asked}, sampling)
        llm.step()
        llm.step()
        llm.add_request("2", {"prompt_token_ids": asked}, sampling)
        served.outcomes()
        assert served.connector.reset_cache()
        while llm.has_unfinished_requests():
            llm.step()
        assert served.outcomes() == [miss(530, "it began before the cache was reset")]
        assert served.manager.usage()[0].chunks == 0
        served.ask(asked)
        assert served.outcomes() == [miss(530)]
        served.assert_at_rest()
