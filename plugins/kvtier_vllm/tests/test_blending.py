"""KV that is moved to other places of prompts, in real engines.

With one layer the KV of a token depends on the token and its position alone, so a blended answer must be the computed
one. Models with more layers give other answers, unless everything is computed again among the chunks.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
from real_engines import BLOCK, CHUNK, cpu, cpu_and_disk, hit, prompt
from sizes import LONG, some
from test_models import ROPES
from test_serving import NOISE, forget

from kvtier_blend.link_pass import LinkPass
from kvtier_blend.rotation import Rotation
from kvtier_blend.settings import SALT, SETTINGS
from kvtier_core.engine.worker.side import WorkerSide
from kvtier_core.types import EventKind

ASKS = {"kvtier_blend": True}
SYSTEM = prompt(700, CHUNK + 6)
FIRST, SECOND, THIRD = (prompt(701 + number, 6 * CHUNK + 9) for number in range(3))
QUESTION = prompt(710, 20)
#: Both documents in the order in which they are stored, and in the other one.
STORED, ASKED = SYSTEM + FIRST + SECOND + QUESTION, SYSTEM + SECOND + FIRST + QUESTION


def blending(stack: dict[str, Any], **settings: Any) -> dict[str, Any]:
    return stack | {SETTINGS: {"accept_quality": "unmeasured", "tail": 0.0, "link": 0, "min_tokens": 0, **settings}}


@pytest.fixture(scope="module")
def one_layer(tmp_path_factory):
    import tiny_llama

    path = tmp_path_factory.mktemp("one-layer")
    tiny_llama.make(path, layers=1)
    return path


@pytest.fixture
def blends(engine):
    """``blends(stack, **options)`` is an engine that can blend."""

    def start(stack, **options):
        return engine(stack, kv_connector="KVTierBlendConnector", **{"enable_prefix_caching": True, **options})

    return start


def blended(engine, asked, salt=SALT, **options):
    return engine.ask(asked, salt=salt, parameters=ASKS, **options)[0]


def moved(engine, *also):
    """Tokens that are moved from now on, and those of other kinds of events, by request."""
    found, kinds = [], (EventKind.BLENDED, *also)
    engine.connector.side.events.listeners.append(
        lambda events: found.extend(event.tokens for event in events if event.kind in kinds)
    )
    return found


def why(engine):
    return engine.connector.side.status.recent(1)[0]["why"]


@pytest.mark.parametrize("tail", [0.0, 0.4])
@pytest.mark.parametrize("kind", some(ROPES))
def test_with_one_layer_a_blended_answer_is_the_computed_one(blends, one_layer, kind, tail):
    rope = {"rope_type": kind, "rope_theta": 1e4, **ROPES[kind]}
    options = {"model": one_layer, "hf_overrides": {"rope_parameters": rope}}
    with blends(blending(cpu(), tail=tail), **options) as served:
        truth = served.ask(ASKED, salt="another")[0]
        served.ask(STORED)
        tokens = moved(served)
        answer = blended(served, ASKED)
        assert sum(tokens) > 4 * CHUNK
        assert f"; blended: {sum(tokens)} moved, " in why(served) and why(served).endswith("the answer may differ")
        served.assert_at_rest()
    assert answer.cached <= (1 - tail) * len(ASKED) + BLOCK
    assert answer.differs(truth) < NOISE


def test_if_all_is_computed_again_the_answer_is_that_of_the_engines_own_hit(blends):
    """The pages of the chunks are filled by one forward of the model, as the engine itself computed them."""
    stored, asked = FIRST + SECOND + QUESTION, prompt(712, 3) + SECOND + FIRST + QUESTION
    with blends(blending(cpu(), link=len(asked))) as served:
        served.ask(stored)
        answer = blended(served, asked)
        assert why(served).endswith(f"; blended: 0 moved, {answer.cached} recomputed; the answer may differ")
        served.ask(asked[: answer.cached], salt="another")
        own = served.ask(asked, salt="another")[0]
    assert answer.cached == own.cached > 0.9 * len(asked)
    assert answer.differs(own) == 0


@pytest.mark.parametrize("limit", [{"max_num_batched_tokens": 160}, {"max_num_seqs": 1}], ids=repr)
def test_runs_are_computed_in_forwards_no_larger_than_the_engines_own(blends, monkeypatch, limit):
    forwards, forward = [], LinkPass._forward
    monkeypatch.setattr(LinkPass, "_forward", lambda link, *args: (forwards.append(args[:2]), forward(link, *args))[1])
    with blends(blending(cpu(), link=200), **{"max_num_seqs": 4, **limit}) as served:
        truth = served.ask(ASKED, salt="another")[0]
        served.ask(STORED)
        forwards.clear()  # those of the test
        blended(served, ASKED)
        most_tokens = limit.get("max_num_batched_tokens", 10_000)
        most_runs = limit.get("max_num_seqs", 4)
        assert len(forwards) > 1
        assert all(len(tokens) <= most_tokens and len(runs) <= most_runs for tokens, runs in forwards)
        assert served.ask(ASKED, salt="another")[0].differs(truth) < NOISE


def test_nothing_of_a_blended_request_reaches_another(blends, tmp_path):
    """A model of four layers answers something else when it is blended, and nothing but that request notices."""
    with blends(blending(cpu_and_disk(tmp_path))) as served:
        truth = served.ask(ASKED, salt="another")[0]
        served.ask(STORED)
        served.settle()
        forget(served)
        held = {level.tier: level.chunks for level in served.manager.usage()}
        for number in range(6):
            forget(served)
            answer = blended(served, ASKED[: -len(QUESTION)] + prompt(720 + number, 40), tokens=CHUNK)
            assert "; blended: " in why(served)
        assert blended(served, ASKED).differs(truth) > 100 * NOISE
        served.settle()
        assert {level.tier: level.chunks for level in served.manager.usage()} == held
        forget(served)
        served.outcomes()
        exact = served.ask(ASKED)[0]
        assert served.outcomes() == [hit(len(ASKED), cpu=CHUNK)], "the system prompt is all that is held of it"
        assert answer.cached > exact.cached
        served.assert_at_rest()
    assert exact.differs(truth) < NOISE


def test_the_engines_own_blocks_of_blended_requests_are_not_stored(blends, tmp_path):
    """A request of the same salt that does not ask for it gets them from vLLM, which says so, and stores nothing."""
    with blends(blending(cpu())) as served:
        served.ask(STORED)
        blended(served, ASKED)
        held = served.manager.usage()[0].chunks
        served.ask(ASKED + prompt(730, 3 * CHUNK), salt=SALT)
        assert why(served).endswith("; the engine's own cache may hold blended KV")
        served.settle()
        assert served.manager.usage()[0].chunks == held


def test_only_a_request_that_asks_and_stays_apart_is_blended(blends):
    with blends(blending(cpu())) as served:
        truth = served.ask(ASKED, salt="another")[0]
        served.ask(STORED)
        for salt, parameters, end in [
            (None, ASKS, "; not blended: its cache_salt does not begin with kvtier-blend:"),
            (SALT, None, ""),
            (SALT, {"kvtier_blend": "yes"}, ""),
        ]:
            forget(served)
            answer = served.ask(ASKED, salt=salt, parameters=parameters)[0]
            assert answer.differs(truth) < NOISE and "; blended" not in why(served) and why(served).endswith(end)


def test_a_tenant_is_given_its_own_kv_alone(blends, one_layer):
    with blends(blending(cpu()), model=one_layer) as served:
        served.ask(STORED, salt="alice")
        unknown = "; not blended: no chunk after its prefix is known"
        for salt in (SALT, SALT + "bob", SALT + SALT + "alice"):
            blended(served, ASKED, salt)
            assert why(served).endswith(unknown)
        blended(served, ASKED, SALT + "alice")
        assert "; blended: " in why(served)


def test_what_an_operator_forbids_a_salt_holds_for_its_blended_requests(blends, monkeypatch):
    for tenant in ("alice", "bob"):
        monkeypatch.setenv(f"KVTIER_TEST_{tenant}", tenant)
    salts = [
        {"cache_salt": "env:KVTIER_TEST_alice", "load": "no"},
        {"cache_salt": "env:KVTIER_TEST_bob", "store": "no"},
    ]
    stack = cpu(requests={"salts": salts})
    with blends(blending(stack)) as served:
        for salt in ("alice", "bob"):
            served.ask(STORED, salt=salt)
        blended(served, ASKED, SALT + "alice")
        assert why(served).endswith("; not blended: it says what may be loaded")
        blended(served, ASKED, SALT + "bob")
        assert "not blended: no chunk after its prefix is known" in why(served)


def test_a_new_document_is_computed_and_stored_for_the_next_request(blends, one_layer):
    """Also by requests that ask to be blended: otherwise it would never be known."""
    asked = SYSTEM + THIRD + SECOND + QUESTION
    with blends(blending(cpu()), model=one_layer) as served:
        truth = served.ask(SYSTEM + SECOND + THIRD + QUESTION, salt="another")[0]
        served.ask(STORED)
        answer = blended(served, asked)
        assert "; not blended: " in why(served) and "in a row are new" in why(served)
        forget(served)
        answer = blended(served, SYSTEM + SECOND + THIRD + QUESTION)
        assert "; blended: " in why(served)
    assert answer.differs(truth) < NOISE


def test_chunks_below_the_arena_are_awaited(blends, one_layer, tmp_path):
    with blends(blending(cpu_and_disk(tmp_path, capacity="2MiB")), model=one_layer) as served:
        truth = served.ask(ASKED, salt="another")[0]
        served.ask(STORED)
        for number in range(3):
            served.ask(prompt(740 + number, 20 * CHUNK))
        served.settle()
        answer = blended(served, ASKED)
        assert "; blended: " in why(served)
        served.assert_at_rest()
    assert answer.differs(truth) < NOISE


@pytest.mark.parametrize("how", ["damaged", "gone"])
def test_a_request_whose_chunks_are_damaged_or_gone_is_computed(blends, tmp_path, how):
    store = tmp_path / "store"
    with blends(blending(cpu_and_disk(store, capacity="2MiB"))) as served:
        truth = served.ask(ASKED, salt="another")[0]
        served.ask(STORED)
        for number in range(3):
            served.ask(prompt(740 + number, 20 * CHUNK))
        served.settle()
        for file in (each for each in store.rglob("*") if each.is_file() and each.stat().st_size > 8192):
            if how == "gone":
                file.unlink()
            else:
                content = bytearray(file.read_bytes())
                content[6000] ^= 1
                file.write_bytes(content)
        answer = blended(served, ASKED)
        assert "; blended" not in why(served)
        served.assert_at_rest()
    assert answer.differs(truth) < NOISE


def test_a_request_whose_link_pass_fails_is_computed(blends, monkeypatch, said):
    with blends(blending(cpu())) as served:
        truth = served.ask(ASKED, salt="another")[0]
        served.ask(STORED)

        def fails(*args):
            raise RuntimeError("no such kernel")

        monkeypatch.setattr(LinkPass, "compute", fails)
        said()
        answer = blended(served, ASKED)
        assert any("blending it failed: RuntimeError: no such kernel" in line for line in said())
        assert why(served).endswith("; not blended: its load failed")
        served.assert_at_rest()
    assert answer.differs(truth) < NOISE


def test_a_request_whose_load_fails_is_computed(blends, monkeypatch):
    with blends(blending(cpu())) as served:
        truth = served.ask(ASKED, salt="another")[0]
        served.ask(STORED)
        submit = WorkerSide._submit

        def fails(side, job, begin):
            submit(side, job, None if job.task[0] not in served.scheduler.requests else begin)

        monkeypatch.setattr(WorkerSide, "_submit", fails)
        answer = blended(served, ASKED)
        assert why(served).endswith("; not blended: its load failed")
        served.assert_at_rest()
    assert answer.differs(truth) < NOISE


def test_a_model_that_computes_other_keys_is_not_blended(blends, monkeypatch):
    """Layers without positions, for instance, whose keys do not turn."""
    monkeypatch.setattr(Rotation, "turn", lambda rotation, keys, old, new: keys)
    with blends(blending(cpu())) as served:
        truth = served.ask(ASKED, salt="another")[0]
        served.ask(STORED)
        answer = blended(served, ASKED)
        assert "; not blended: this engine cannot blend: 1 positions further it does not compute" in why(served)
    assert answer.differs(truth) < NOISE


def test_an_audited_hit_is_not_blended(blends):
    """An audit compares a chunk with what the engine computes, which it does not if the chunk is moved."""
    with blends(blending(cpu(audit_every=1))) as served:
        served.ask(SYSTEM + FIRST + SECOND + QUESTION)
        blended(served, SYSTEM + FIRST[: 2 * CHUNK] + SECOND + QUESTION)
        assert "; not blended: its hit is audited" in why(served)
        served.assert_at_rest()


def test_chunks_that_passed_through_a_lossy_codec_are_not_blended(blends, one_layer, tmp_path):
    stack = cpu_and_disk(tmp_path, capacity="2MiB")
    stack["tiers"][1] |= {"serializer": "fp8", "accept_quality": "unmeasured"}
    with blends(blending(stack), model=one_layer, dtype="bfloat16") as served:
        served.ask(STORED)
        for number in range(3):
            served.ask(prompt(740 + number, 20 * CHUNK))
        served.settle()
        blended(served, ASKED)
        assert "; blended" not in why(served) and "; not blended: " in why(served)
        served.assert_at_rest()


def test_nothing_is_blended_after_the_cache_was_reset(blends, one_layer):
    with blends(blending(cpu()), model=one_layer) as served:
        served.ask(STORED)
        assert served.llm.reset_prefix_cache(reset_connector=True)
        blended(served, ASKED)
        assert why(served).endswith("; not blended: no chunk after its prefix is known")
        served.outcomes()


@pytest.mark.parametrize("seed", range(LONG))
def test_random_documents_in_random_order(blends, one_layer, tmp_path, seed):
    """With one layer every answer is the computed one, whatever was stored, evicted, moved or preempted before."""
    rng = random.Random(seed)
    documents = [prompt(seed * 100 + number, rng.randrange(2 * CHUNK, 6 * CHUNK)) for number in range(8)]
    asked = []
    for _ in range(24):
        chosen = rng.sample(documents, rng.randrange(2, 5))
        begin, question = (
            SYSTEM[: rng.choice([0, CHUNK, len(SYSTEM)])],
            prompt(rng.randrange(10**6), rng.randrange(1, 40)),
        )
        asked.append([token for part in (begin, *chosen, question) for token in part])
    options = {"model": one_layer, "num_gpu_blocks_override": 120, "max_num_batched_tokens": 256, "max_num_seqs": 4}
    with blends(blending(cpu_and_disk(tmp_path, capacity="3MiB"), link=rng.choice([0, 3])), **options) as served:
        truths = served.ask(*asked, salt="another")
        tokens = moved(served)
        answers = served.ask(*asked, salt=SALT, parameters=ASKS)
        served.assert_at_rest()
    assert sum(tokens) > 10 * CHUNK
    assert max(answer.differs(truth) for answer, truth in zip(answers, truths, strict=True)) < NOISE


@pytest.mark.more
def test_documents_stay_known_while_prompts_go_on(blends, one_layer):
    """Five of 40 documents in each of 500 prompts, in an arena for one and a half times the documents."""
    rng, chunks, asked = random.Random(0), 10, 5
    documents = [prompt(number, chunks * CHUNK) for number in range(40)]
    capacity = f"{40 * chunks * 3 // 2 * 68}KiB"
    options = {"model": one_layer, "max_model_len": 4096, "max_num_batched_tokens": 4096}
    with blends(blending(cpu(capacity), link=4), **options) as served:
        tokens = moved(served, EventKind.HIT)  # a document after its first beginning is an exact hit
        for number in range(500):
            if number == 400:
                tokens.clear()
            parts = [SYSTEM, *rng.sample(documents, asked), prompt(10_000 + number, 20)]
            blended(served, [token for part in parts for token in part], tokens=1)
        served.assert_at_rest()
    assert sum(tokens) - 100 * CHUNK > 0.8 * 100 * asked * chunks * CHUNK


def test_only_what_is_new_in_a_prompt_is_stored(blends, one_layer):
    """Copies of known documents after other beginnings would displace what others need."""
    with blends(blending(cpu()), model=one_layer) as served:
        served.ask(STORED)
        served.settle()
        held = served.manager.usage()[0].chunks
        asked = SYSTEM + SECOND + THIRD + FIRST + QUESTION
        blended(served, asked)
        served.settle()
        beside = 4  # parts of chunks at both ends, and the question
        assert len(THIRD) // CHUNK <= served.manager.usage()[0].chunks - held <= len(THIRD) // CHUNK + beside
        forget(served)
        answer, truth = blended(served, asked), served.ask(asked, salt="another")[0]
        assert "; blended: " in served.connector.side.status.recent(2)[0]["why"]
    assert answer.differs(truth) < NOISE


def test_an_engine_that_cannot_be_blended_is_served_exactly(blends, tmp_path, said):
    import tiny_hybrids

    tiny_hybrids.make("gemma3", tmp_path / "model")
    with blends(blending(cpu()), model=tmp_path / "model") as served:
        truth = served.ask(ASKED, salt="another")[0]
        refused = "this engine cannot blend: not all of its layers attend to every token"
        assert any(refused in line for line in said())
        served.ask(ASKED)
        answer = blended(served, ASKED)
        assert f"; not blended: {refused}" in why(served)
    assert answer.cached > 0 and answer.differs(truth) < NOISE
