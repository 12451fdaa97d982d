"""The engine computes the last chunk of an audited hit. If the stored one differs, nothing more is loaded."""

from __future__ import annotations

import random
import shutil
from collections.abc import Sequence
from typing import Any

import attrs
import pytest
from real_engines import CHUNK, cpu, cpu_and_disk, prompt
from safetensors.torch import load_file, save_file
from sizes import LONG
from test_adapters import RANK, write
from test_server import NOISE, of, serving
from vllm.lora.request import LoRARequest

from kvtier_core.builtin.chained import Chained
from kvtier_core.types import EventKind
from kvtier_vllm.identity import settings
from kvtier_vllm.requests.adapters import Adapters

#: The kinds of events of an audit that has ended.
ENDED = (EventKind.AUDITED, EventKind.CORRUPT)
ASKED = prompt(1, 4 * CHUNK + 3)


def audits(engine):
    """The findings of all audits from now on."""
    found = []
    engine.connector.side.events.listeners.append(
        lambda events: found.extend(event.why for event in events if event.kind in ENDED)
    )
    return found


def test_of_an_audited_hit_the_last_chunk_is_computed_and_the_answer_stays_the_same(engine):
    with engine(cpu(audit_every=2)) as served:
        found, answers = audits(served), [served.ask(ASKED)[0] for _ in range(6)]
        assert [answer.cached for answer in answers] == [0, 4 * CHUNK, 3 * CHUNK, 4 * CHUNK, 3 * CHUNK, 4 * CHUNK]
        assert found == ["", ""]
        assert len({answer.tokens for answer in answers}) == 1
        served.assert_at_rest()


#: So few blocks that the engine's own cache has lost most prompts when they return.
OWN_CACHE = {"enable_prefix_caching": True, "num_gpu_blocks_override": 40, "max_model_len": 1024}


@pytest.mark.parametrize("packing", ["off", "auto"])
@pytest.mark.parametrize("options", [{}, {"dtype": "bfloat16"}, OWN_CACHE], ids=repr)
def test_there_is_no_false_alarm(engine, tmp_path, options, packing):
    rng, stack = random.Random(0), cpu_and_disk(tmp_path, audit_every=1)
    stack["tiers"][0] |= {"packing": packing, "capacity": "4MiB"}
    heads = [prompt(each, 6 * CHUNK) for each in range(3)]
    with engine(stack, max_num_batched_tokens=128, max_num_seqs=4, **options) as served:
        found = audits(served)
        for _ in range(12 * LONG):
            prefixes = [rng.choice(heads)[: rng.randrange(6 * CHUNK)] for _ in range(4)]
            served.ask(*(prompt(rng.randrange(20), rng.randrange(CHUNK, 8 * CHUNK), each) for each in prefixes))
            served.settle()
        assert len(found) > 5 * LONG and set(found) == {""}
        served.assert_at_rest()


def test_an_engine_of_a_server_audits_what_others_have_stored(engine, tmp_path):
    with serving(tmp_path):
        with engine(of(tmp_path)) as first:
            truth = first.ask(ASKED)[0]
        with engine(of(tmp_path) | {"audit_every": 1}) as second:
            found, answers = audits(second), []
            while not found:  # a server that is late with its answer is not waited for
                answers += second.ask(ASKED)
            assert (answers[-1].cached, found) == (3 * CHUNK, [""])
            assert max(answer.differs(truth) for answer in answers) < NOISE
            second.assert_at_rest()


@attrs.frozen
class Hole:
    """What two engines do that have one identity, although the KV of the second is not the first one's."""

    settings: dict[str, Any] = attrs.field(factory=dict)
    options: Sequence[dict[str, Any]] = ({}, {})  # of the engines
    asked: Sequence[Sequence[int]] = (ASKED, ASKED)
    more: Sequence[dict[str, Any]] = ({}, {})  # of the requests


def weights_under_a_name(model, path, monkeypatch):
    changed = path / "changed"
    shutil.copytree(model, changed)
    tensors = load_file(changed / "model.safetensors")
    tensors["model.layers.1.self_attn.v_proj.weight"] *= 1.5
    save_file(tensors, changed / "model.safetensors", metadata={"format": "pt"})
    return Hole({"identity": {"weights": "name:one"}}, ({}, {"model": changed}))


def a_setting_that_is_no_fact(model, path, monkeypatch):
    monkeypatch.setattr(settings, "of_configuration", lambda *args, **more: {})
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 20000.0}}
    return Hole(options=({}, {"hf_overrides": rope}))


def keys_that_do_not_say_which_tokens(model, path, monkeypatch):
    def keys_of_zeros(self, tokens, **more):
        return keys(self, [0] * len(tokens), **more)

    keys = Chained.keys
    monkeypatch.setattr(Chained, "keys", keys_of_zeros)
    return Hole(asked=(prompt(2, len(ASKED)), ASKED))


def adapters_that_are_not_told_apart(model, path, monkeypatch):
    monkeypatch.setattr(Adapters, "content", lambda self, asked: "the same")
    options = {"enable_lora": True, "max_lora_rank": RANK}
    adapters = []
    for number in (1, 2):
        write(path / str(number), number)
        adapters.append({"adapter": LoRARequest("one name", number, str(path / str(number)))})
    return Hole(options=(options, options), more=adapters)


HOLES = [
    weights_under_a_name,
    a_setting_that_is_no_fact,
    keys_that_do_not_say_which_tokens,
    adapters_that_are_not_told_apart,
]


@pytest.mark.parametrize("hole", HOLES)
def test_wrong_kv_is_noticed_with_the_first_hit_and_then_nothing_is_loaded(
    engine, model, tmp_path, monkeypatch, said, hole
):
    opened = hole(model, tmp_path, monkeypatch)
    stack = cpu_and_disk(tmp_path / "disk", audit_every=1, **opened.settings)
    asked = list(zip(opened.asked, opened.more, strict=True))
    with engine(stack, **opened.options[0]) as served:
        served.ask(asked[0][0], **asked[0][1])
    with engine(stack, **opened.options[1]) as served:
        found, (tokens, more) = audits(served), asked[1]
        assert served.ask(tokens, **more)[0].cached == 3 * CHUNK, "the hole is not open"
        assert len(found) == 1 and "differs by" in found[0]
        assert f"is not what this engine computes: {found[0]}. Nothing is stored or loaded." in "\n".join(said())
        assert [served.ask(tokens, **more)[0].cached for _ in range(2)] == [0, 0]
        served.assert_at_rest()
