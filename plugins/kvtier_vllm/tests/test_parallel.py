"""Engines of several ranks: pipeline stages with layers of their own, ranks that hold the same KV, and other ranks."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path

import pytest
import torch
from cpu_parallel import let_stages_receive
from latent_kernels import KERNELS, reuse_anyway
from real_engines import Engine, Outcome, cpu_and_disk, hit, miss, told_by_engines
from sizes import some
from test_processes import ASKED, ask_twice, largest_difference
from test_serving import COLD, NOISE


def ask_in_stages(model: str, stack: dict, options: dict) -> list:
    """In another process: two passes over two prompts."""
    let_stages_receive()
    engine = Engine(Path(model), stack, **options)
    rows = [engine.ask(*ASKED), engine.ask(*ASKED)]
    told = told_by_engines()
    engine.llm.llm_engine.engine_core.shutdown()
    return [*([[a.tokens, a.logprobs, a.cached] for a in row] for row in rows), told]


@pytest.fixture(scope="module")
def of_five_layers(tmp_path_factory):
    """Two stages cannot have the same number of them."""
    import tiny_llama

    path = tmp_path_factory.mktemp("five")
    tiny_llama.make(path, layers=5)
    return path


@pytest.fixture
def start(fork_server, tmp_path):
    """``start(function, model, **options)`` is an engine's life over a folder; ``settings`` are those of the stack."""

    def start(function, model, settings=None, **options):
        environment = {
            "VLLM_WORKER_MULTIPROC_METHOD": "fork",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
            "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # of functions that a test calls in workers
        }
        arguments = {"model": str(model), "stack": cpu_and_disk(tmp_path, **settings or {}), "options": options}
        return fork_server.run(f"test_parallel:{function}", environment, **arguments)

    return start


@pytest.mark.parametrize("ranks", some([1, 2]))
def test_stages_keep_their_layers_and_reuse_them(engine, start, of_five_layers, ranks):
    """From memory, and from disk in a new engine. The frames hold the layers of all stages."""
    with engine(model=of_five_layers) as plain:
        truth = [(list(answer.tokens), answer.logprobs, 0) for answer in plain.ask(*ASKED)]
    ask = functools.partial(start, "ask_in_stages", of_five_layers, pipeline_parallel_size=2)
    (cold, warm, [told]), log = ask(tensor_parallel_size=ranks)
    (disk, _, [again]), _ = ask(tensor_parallel_size=ranks)
    assert [[cached for *_, cached in each] for each in (cold, warm, disk)] == [[0, 0], [512, 512], [512, 512]]
    assert [Outcome.of(each) for each in told[2:]] == [hit(530, cpu=512)] * 2
    assert [Outcome.of(each) for each in again[:2]] == [hit(530, disk=512)] * 2
    for answers in (cold, warm, disk):
        assert largest_difference(answers, truth) < NOISE
    assert "a chunk takes 324KiB" in log  # 5 layers of 2 heads of 64 tokens, keys and values of 64 numbers


def test_a_stage_may_have_no_layer_of_a_group(engine, start, tmp_path):
    """Windows in both stages, and full attention in the second one alone."""
    import tiny_hybrids

    tiny_hybrids.make("gemma3", tmp_path / "model")
    with engine(model=tmp_path / "model") as plain:
        truth = [(list(answer.tokens), answer.logprobs, 0) for answer in plain.ask(*ASKED)]
    (cold, warm, [told]), _ = start("ask_in_stages", tmp_path / "model", pipeline_parallel_size=2)
    assert [[cached for *_, cached in each] for each in (cold, warm)] == [[0, 0], [512, 512]]
    assert [Outcome.of(each) for each in told[2:]] == [hit(530, cpu=512)] * 2
    assert max(largest_difference(answers, truth) for answers in (cold, warm)) < NOISE


def ask_and_compare(model: str, stack: dict, options: dict) -> list:
    """In another process: an answer computed, one from the engine's own cache, one from ours; then what ranks hold."""
    if options["attention_backend"] == "CPU_MLA":
        reuse_anyway()
    engine = Engine(Path(model), stack, enable_prefix_caching=True, **options)
    answers = []
    for forgets in (False, False, True):
        if forgets:
            assert engine.llm.reset_prefix_cache()
        answers += engine.ask(ASKED[0])
    held, told = engine.llm.collective_rpc("get_digests_of_pages"), told_by_engines()
    engine.llm.llm_engine.engine_core.shutdown()
    return [[[a.tokens, a.logprobs, a.cached] for a in answers], held, told]


LOOKS = {"dtype": "bfloat16", "worker_extension_cls": "test_parallel.LooksAtPages"}


class LooksAtPages:
    """Of a worker. A function in place of its method might change weights, so that the KV would be invalidated."""

    def get_digests_of_pages(self) -> list[str]:
        """Of the KV that it computed for the first 512 tokens, by layer. Block 0 is vLLM's own."""
        blocks = slice(1, 1 + 512 // self.vllm_config.cache_config.block_size)
        pages = (cache[blocks].contiguous().view(torch.uint8) for cache in self.model_runner.kv_caches)
        return [hashlib.sha256(each.numpy()).hexdigest() for each in pages]


def assert_equal_to_own_hit(kernel, own, outcome, *others):
    """Where the engine has hits of its own."""
    if kernel == "AMX_MLA":
        Outcome.of(outcome).assert_own(own[2])
        assert all(other == own for other in others)


@pytest.mark.more
@pytest.mark.parametrize("kernel", KERNELS)
def test_the_latent_is_stored_once(start, latent, kernel):
    """Every rank of latent attention has all of it, to the last bit."""
    options = {"attention_backend": kernel, "tensor_parallel_size": 2}
    start = functools.partial(start, "ask_and_compare", latent, **LOOKS, **options)
    ((cold, own, ours), held, [told]), log = start()
    ((disk, *_), loaded, [again]), _ = start()
    assert held[0] == held[1] == loaded[0] == loaded[1] and len(set(held[0])) == 4
    assert (cold[2], Outcome.of(told[-1]), Outcome.of(again[0])) == (0, hit(530, cpu=512), hit(530, disk=512))
    assert_equal_to_own_hit(kernel, own, told[1], ours, disk)
    assert "a chunk takes 292KiB" in log  # 4 layers, 64 tokens of 512 + 64 numbers, and a header


ANY = {"identity": {"ranks": "any"}}


@pytest.mark.parametrize(("first", "other"), some([(1, 2), (2, 1)]))
def test_an_engine_with_other_ranks_finds_each_head_in_its_place(engine, start, model, first, other):
    with engine() as plain:
        truth = [(list(answer.tokens), answer.logprobs, 0) for answer in plain.ask(*ASKED)]
    start(ask_twice.__name__, model, ANY, tensor_parallel_size=first)
    (disk, warm, [told]), log = start(ask_twice.__name__, model, ANY, tensor_parallel_size=other)
    assert [[cached for *_, cached in each] for each in (disk, warm)] == [[512, 512]] * 2
    assert [Outcome.of(each) for each in told] == [hit(530, disk=512)] * 2 + [hit(530, cpu=512)] * 2
    assert max(largest_difference(answers, truth) for answers in (disk, warm)) < NOISE
    assert "ranks: any -> own" not in log


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(("first", "other"), some([(1, 2), (2, 1)]))
def test_the_latent_is_the_same_whatever_the_ranks(start, latent, first, other, kernel):
    """What is in the pages, to the last bit: answers of other ranks differ by more than noise in bfloat16."""
    start = functools.partial(start, "ask_and_compare", latent, ANY, attention_backend=kernel, **LOOKS)
    (_, computed, _), _ = start(tensor_parallel_size=first)
    ((disk, own, ours), loaded, [told]), _ = start(tensor_parallel_size=other)
    assert loaded == computed[:1] * other
    assert Outcome.of(told[0]) == hit(530, disk=512)
    assert_equal_to_own_hit(kernel, own, told[1], ours, disk)


@pytest.mark.more
def test_by_default_an_engine_with_other_ranks_finds_nothing(start, model):
    start(ask_twice.__name__, model, tensor_parallel_size=1)
    (cold, _, [told]), log = start(ask_twice.__name__, model, tensor_parallel_size=2)
    assert [cached for *_, cached in cold] == [0, 0]
    assert [Outcome.of(each) for each in told[:2]] == [miss(530)] * 2
    assert COLD in log
