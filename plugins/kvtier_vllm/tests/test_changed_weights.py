"""Weights that change in a running engine, of which nobody tells. Every answer is that of an engine with these weights.

vLLM's own caches are emptied as a user does it, which says nothing to a connector.
"""

from __future__ import annotations

import types
from pathlib import Path

import pytest
import torch
from real_engines import Engine, cpu, cpu_and_disk, hit, prompt
from sizes import some
from test_processes import largest_difference
from test_serving import NOISE, forget
from vllm.compilation.cuda_graph import CUDAGraphWrapper

from kvtier_vllm.weight_watch import models_of_caller

ASKED, ANOTHER = prompt(130, 530), prompt(131, 530)


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    """The folder of a model with other weights."""
    import tiny_llama

    path = tmp_path_factory.mktemp("other")
    tiny_llama.make(path, seed=1)
    return path


def model_of(served):
    return served.llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.get_model()


def reload(served, other):
    served.llm.collective_rpc("reload_weights", kwargs={"weights_path": str(other)})


def reload_past_the_engine(served, other):
    """As some trainers do, who know the engine's executor."""
    executor = served.llm.llm_engine.engine_core.engine_core.model_executor
    executor.collective_rpc("reload_weights", kwargs={"weights_path": str(other)})


def load_tensors(served, other):
    """As trainers do that share the engine's process. vLLM's loaders write to `.data`, which PyTorch does not count."""
    norm = "model.layers.1.input_layernorm.weight"
    values = model_of(served).get_parameter(norm).clone()
    values[0] *= 4  # of which no byte is compared
    model_of(served).load_weights([(norm, values)])


def one_of_the_model(served, other):
    served.llm.apply_model(_write_a_value)


def _write_a_value(model):
    """One of which no byte is compared, past what PyTorch counts."""
    model.model.layers[1].input_layernorm.weight.data[0] *= 4


def any_function(served, other):
    served.llm.collective_rpc(lambda worker: _write_a_value(worker.get_model()))


def an_optimizers_step(served, other):
    with torch.no_grad():
        model_of(served).model.layers[1].input_layernorm.weight[0] *= 4


def every_value_by_hand(served, other):
    for weight in model_of(served).parameters():
        weight.data.mul_(1.25)


def other_memory(served, other):
    weight = model_of(served).model.layers[2].input_layernorm.weight
    weight.data = torch.cat([weight.data[:1] * 4, weight.data[1:]])


def other_objects(served, other):
    """In the same memory, written to as often, with another value of which no byte is compared."""
    norm = model_of(served).model.layers[2].input_layernorm
    before, norm.weight.data[0] = norm.weight, norm.weight.data[0] * 4
    norm.weight = torch.nn.Parameter(before.data, requires_grad=False)
    for _ in range(before._version):
        norm.weight.add_(0)


WAYS = [
    reload,
    reload_past_the_engine,
    load_tensors,
    one_of_the_model,
    any_function,
    an_optimizers_step,
    every_value_by_hand,
    other_memory,
    other_objects,
]


class Runner:
    """A model runner of vLLM's as far as its models go."""

    def __init__(self, model, /, **drafter):
        self.model, self.drafter = model, types.SimpleNamespace(**drafter)

    def get_model(self):
        return self.model

    def asks(self):
        return models_of_caller()


def in_cuda_graphs(model):
    """As vLLM wraps one whose whole forward is a CUDA graph; it cannot be made without a GPU."""
    wrapper = CUDAGraphWrapper.__new__(CUDAGraphWrapper)
    wrapper.runnable = model
    return wrapper


def test_models_in_cuda_graphs_are_watched_and_what_cannot_be_is_not_served():
    model, draft = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    wrapped = Runner(in_cuda_graphs(in_cuda_graphs(model)), model=in_cuda_graphs(draft))
    for runner in (Runner(model, model=draft), wrapped):
        found = runner.asks()
        assert [id(each) for each in found] == [id(model), id(draft)]
    assert Runner(model).asks() == [model]
    assert Runner(model, model="compiled elsewhere").asks() == []


@pytest.mark.parametrize("change", some(WAYS, reload, load_tensors, an_optimizers_step, other_memory))
@pytest.mark.parametrize("own_cache", some([False, True]))
def test_changed_weights_find_no_earlier_kv(engine, other, tmp_path, change, own_cache):
    """Neither what is loaded, nor what is stored, nor what another engine with the first weights finds later."""
    stack, options = cpu_and_disk(tmp_path), {"enable_prefix_caching": own_cache}
    with engine(**options) as plain:
        first = plain.ask(ASKED, ANOTHER)
        change(plain, other)
        assert plain.llm.reset_prefix_cache()
        truth = plain.ask(ASKED, ANOTHER)
    assert min(a.differs(b) for a, b in zip(first, truth, strict=True)) > NOISE
    with engine(stack, **options) as served:
        served.ask(ASKED)
        served.settle()
        change(served, other)
        forget(served)
        changed = [*served.ask(ASKED), *served.ask(ANOTHER)]
        forget(served)
        again = [*served.ask(ASKED), *served.ask(ANOTHER)]
        forget(served)
        warm = served.ask(ANOTHER)[0]
        served.assert_at_rest()
    assert max(a.differs(b) for a, b in zip(changed, truth, strict=True)) < NOISE
    assert max(a.differs(b) for a, b in zip(again, truth, strict=True)) < NOISE
    assert warm.cached == 512 and warm.differs(truth[1]) < NOISE, "the new weights have an epoch of their own"
    with engine(stack, **options) as restarted:
        answers = [*restarted.ask(ASKED), *restarted.ask(ANOTHER)]
    assert max(a.differs(b) for a, b in zip(answers, first, strict=True)) < NOISE


class Extension:
    """Of the workers of an engine with two ranks. By its name, its method is not known to touch weights."""

    def get_on_with_it(self):
        weight = self.get_model().model.layers[1].input_layernorm.weight
        if self.rank:
            with torch.no_grad():
                weight[0] *= 4
        else:
            weight.data[0] *= 4  # which this rank cannot notice


def ask_before_and_after(model: str, stack: dict, options: dict) -> list:
    """In another process."""
    engine = Engine(Path(model), stack, **options)
    rows = [engine.ask(ASKED)]
    engine.llm.collective_rpc("get_on_with_it")
    rows += [[*engine.ask(ASKED), *engine.ask(ANOTHER)] for _ in range(3)]
    engine.llm.llm_engine.engine_core.shutdown()
    return [[[a.tokens, a.logprobs, a.cached] for a in row] for row in rows]


def test_a_change_that_one_of_two_ranks_notices_is_one_for_both(engine, fork_server, tmp_path, model):
    def plain(answers):
        return [(list(answer.tokens), answer.logprobs, 0) for answer in answers]

    with engine() as first:
        before = plain(first.ask(ASKED, ANOTHER))
        an_optimizers_step(first, None)
        after = plain(first.ask(ASKED, ANOTHER))
    options = {"tensor_parallel_size": 2, "worker_extension_cls": "test_changed_weights.Extension"}
    arguments = {"model": str(model), "stack": cpu_and_disk(tmp_path), "options": options}
    environment = {
        "VLLM_WORKER_MULTIPROC_METHOD": "fork",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
    }
    (old, *changed), log = fork_server.run("test_changed_weights:ask_before_and_after", environment, **arguments)
    assert largest_difference(old, before[:1]) < NOISE
    assert max(largest_difference(answers, after) for answers in changed) < NOISE
    assert [[cached for *_, cached in answers] for answers in changed][-1] == [512, 512]
    assert log.count("kvtier: the weights have changed; stored KV is invalidated: rank 1: parameters were") == 1
    (again, *_), _ = fork_server.run("test_changed_weights:ask_before_and_after", environment, **arguments)
    assert largest_difference(again, before[:1]) < NOISE


def test_engines_find_only_frames_of_their_weights_in_a_shared_store(engine, other, tmp_path):
    stack = cpu_and_disk(tmp_path)
    stack["tiers"][1]["shared"] = True
    with engine(stack) as served:
        first = served.ask(ASKED)[0]
        served.settle()
        reload_past_the_engine(served, other)
        changed = [*served.ask(ASKED), *served.ask(ANOTHER), *served.ask(ANOTHER)]
        served.settle()
        assert changed[0].differs(first) > NOISE
    with engine(stack) as neighbour:
        beside = [*neighbour.ask(ASKED), *neighbour.ask(ANOTHER)]
    with engine() as plain:
        truth = plain.ask(ASKED, ANOTHER)
    assert [answer.cached for answer in beside] == [512, 0]
    assert max(a.differs(b) for a, b in zip(beside, truth, strict=True)) < NOISE


def test_a_call_that_leaves_the_weights_alone_keeps_what_is_stored(engine):
    with engine(cpu()) as served:
        served.ask(ASKED)
        served.llm.collective_rpc("get_model_inspection")
        served.outcomes()
        served.ask(ASKED)
        assert served.outcomes() == [hit(530, cpu=512)]


def test_a_trainer_that_resets_kvtier_opens_one_epoch(engine, said):
    """What a worker notices of a change that the scheduler side has heard of is nothing new."""
    with engine(cpu()) as served:
        served.ask(ASKED)
        an_optimizers_step(served, None)
        served.llm.llm_engine.reset_prefix_cache(reset_connector=True)
        said()
        served.ask(ASKED)
        served.ask(ASKED)
        assert not [line for line in said() if "the weights have changed" in line]
        assert served.ask(ASKED)[0].cached == 512
