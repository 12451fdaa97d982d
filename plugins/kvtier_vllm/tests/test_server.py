"""Real vLLM engines on one server, in a process of its own."""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
import time

import pytest
import tiny_hybrids
from chunk_files import chunk_files
from other_engine import beside
from patience import HANG, wait_until
from real_engines import hit, prompt
from servers.kvtier import kvtier_serve
from servers.stopping import stopped
from test_data_parallel import one_life
from test_hybrid import OPTIONS
from test_processes import largest_difference, run

from kvtier_remote import memory
from kvtier_serve.operators.asking import RunningServer

NOISE = 1e-3


@contextlib.contextmanager
def serving(folder, *stores, capacity="64MiB", keep=None, packing="off"):
    """`kvtier serve` with an arena, whose memory is kept or not, and these store tiers below it."""
    path = folder / "kvtier.sock"
    kept = f", keep: {keep}" if keep else ""
    tiers = [f"{{type: cpu, capacity: {capacity}, huge_pages: off, packing: {packing}{kept}}}", *stores]
    file = folder / "kvtier.yaml"
    file.write_text("version: 1\ntiers:\n" + "".join(f"  - {tier}\n" for tier in tiers))
    with kvtier_serve(file, path) as server:
        yield server


def of(folder):
    """The file of an engine of that server."""
    return {
        "version": 1,
        "chunk_tokens": 64,
        "load": "always",
        "load_wait": "60s",
        "server": f"unix:{folder}/kvtier.sock",
    }


def test_two_engines_share_what_each_stored(engine, fork_server, model, tmp_path):
    asked, other = prompt(1, 530), prompt(2, 530)
    with serving(tmp_path), engine(of(tmp_path)) as first, beside(fork_server, model, of(tmp_path)) as second:
        truth = first.ask(asked)[0]
        assert second.ask(asked).differs(truth) < NOISE
        assert second.outcome == hit(530, cpu=512)
        truth = second.ask(other)
        assert first.ask(other)[0].differs(truth) < NOISE
        assert first.outcomes()[-1] == hit(530, cpu=512)
        first.assert_at_rest()


def test_a_restarted_engine_is_warm_from_memory(engine, tmp_path):
    asked = prompt(3, 530)
    with serving(tmp_path):
        with engine(of(tmp_path)) as first:
            truth = first.ask(asked)[0]
        with engine(of(tmp_path)) as second:
            assert second.ask(asked)[0].differs(truth) < NOISE
            assert second.outcomes() == [hit(530, cpu=512)]


def test_what_a_request_keeps_in_memory_serves_other_engines_and_lies_on_no_disk(engine, tmp_path):
    asked, disk = prompt(5, 530), tmp_path / "disk"
    with serving(tmp_path, f"{{type: disk, path: {disk}, capacity: 64MiB, min_free: 0B}}"):
        with engine(of(tmp_path)) as first:
            truth = first.ask(asked, parameters={"kvtier.store": "memory"})[0]
            first.settle()
        with engine(of(tmp_path)) as second:
            assert second.ask(asked, parameters={"kvtier.store": "no"})[0].differs(truth) < NOISE
            assert second.outcomes() == [hit(530, cpu=512)]
            second.settle()
            assert chunk_files(disk) == []
            second.ask(asked)
            wait_until(lambda: len(chunk_files(disk)) == 8)


def test_an_arranged_prompt_is_bit_equal_to_the_engines_own_prefix_hit(engine, tmp_path):
    before, after, documents = prompt(20, 64), prompt(21, 82), [prompt(seed, 128) for seed in (22, 23, 24)]

    def of_order(order):
        return [*before, *(token for number in order for token in documents[number]), *after]

    with serving(tmp_path):
        with engine(of(tmp_path), enable_prefix_caching=True) as stored:
            stored.ask(of_order([2, 0, 1]))
            (own,) = stored.own_hits(of_order([2, 0, 1]))
            stored.settle()
        asked = {"before": before, "documents": documents, "after": after}
        told = RunningServer.at_socket(tmp_path / "kvtier.sock.http").ask("POST", "/arrange", asked)
        assert told["best"] == {"documents": [2, 0, 1], "cached_tokens": 512}
        assert told["requested"]["cached_tokens"] == 64
        with engine(of(tmp_path)) as other:
            assert other.ask(of_order(told["best"]["documents"]))[0].differs(own) == 0.0
            assert other.outcomes() == [hit(530, cpu=512)]


def test_an_engine_is_never_without_an_answer_while_its_server_is_replaced(engine, tmp_path):
    asked, other = prompt(4, 530), prompt(13, 530)
    disk = f"{{type: disk, path: {tmp_path}/disk, capacity: 64MiB, min_free: 0B}}"
    with engine() as plain:
        truth = plain.ask(asked)[0]
    with contextlib.ExitStack() as closing:
        killed = closing.enter_context(serving(tmp_path, disk))
        served = closing.enter_context(engine(of(tmp_path)))
        assert served.ask(asked)[0].differs(truth) == 0
        served.settle()
        killed.kill()
        killed.wait()
        assert served.ask(asked)[0].differs(truth) == 0
        assert "no session of the server" in served.outcomes()[-1].why
        with serving(tmp_path, disk):
            deadline = time.monotonic() + HANG
            while served.outcomes()[-1:] != [hit(530, cpu=512)]:
                served.ask(other)
                assert time.monotonic() < deadline, "the engine does not find the server that came in its place"
            for tier in ("disk", "cpu"):
                assert served.ask(asked)[0].differs(truth) < NOISE
                assert served.outcomes()[-1] == hit(530, **{tier: 512})
            served.assert_at_rest()


@pytest.mark.more
def test_an_engine_whose_worker_met_a_stopped_server_uses_it_later(engine, tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "_PATIENCE", 0.1)
    asked = prompt(12, 530)
    with engine() as plain:
        truth = plain.ask(asked)[0]
    with serving(tmp_path) as running, engine(of(tmp_path)) as served:
        with stopped(running.pid):
            assert served.ask(asked)[0].differs(truth) == 0
            assert not served.outcomes()[-1].loaded
        deadline = time.monotonic() + HANG
        while served.outcomes()[-1:] != [hit(530, cpu=512)]:
            assert served.ask(asked)[0].differs(truth) < NOISE
            assert time.monotonic() < deadline, "the engine stays without its server"
        served.assert_at_rest()


@pytest.mark.more
def test_a_server_that_is_replaced_under_load_keeps_its_memory(engine, tmp_path):
    """It is killed once and replaced once in the orderly way, while requests come; none fails or differs."""
    prompts = [prompt(seed, 530) for seed in (9, 10, 11)]
    with engine() as plain:
        truths = [plain.ask(each)[0] for each in prompts]
    with contextlib.ExitStack() as closing:
        keep = closing.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm"))
        running = closing.enter_context(serving(tmp_path, keep=keep))
        served = closing.enter_context(engine(of(tmp_path)))
        for asked, truth in zip(prompts, truths, strict=True):
            assert served.ask(asked)[0].differs(truth) == 0
        served.settle()
        for end in (signal.SIGKILL, signal.SIGTERM):
            running.send_signal(end)
            answers = [served.ask(asked)[0] for asked in prompts]
            running.wait(HANG)
            running = closing.enter_context(serving(tmp_path, keep=keep))
            deadline = time.monotonic() + HANG
            while served.outcomes()[-1:] != [hit(530, cpu=512)]:
                answers += [served.ask(asked)[0] for asked in prompts]
                assert time.monotonic() < deadline, "what was in memory is not found"
            for number, answer in enumerate(answers):
                assert answer.differs(truths[number % 3]) < NOISE
        served.assert_at_rest()


@pytest.mark.more
def test_two_models_share_one_budget(engine, fork_server, tmp_path, model):
    """Blocks of another length make slots of another length; the memory has room for both prompts, and not for more."""
    asked, wide = prompt(5, 530), {"block_size": 64}
    file, other = of(tmp_path), of(tmp_path) | {"chunk_tokens": 128}
    with (
        serving(tmp_path, capacity="8MiB"),
        engine(file) as first,
        beside(fork_server, model, other, **wide) as second,
    ):
        truth = first.ask(asked)[0]
        second.ask(asked)
        assert second.ask(asked).differs(truth) < NOISE
        assert second.outcome == hit(530, cpu=512)
        assert first.ask(asked)[0].differs(truth) < NOISE
        assert first.outcomes()[-1] == hit(530, cpu=512)


def test_a_reset_of_one_engine_is_not_felt_by_another(engine, fork_server, model, tmp_path):
    asked = prompt(6, 530)
    with serving(tmp_path), engine(of(tmp_path)) as first, beside(fork_server, model, of(tmp_path)) as second:
        truth = first.ask(asked)[0]
        assert second.ask(asked, reset=True).differs(truth) < NOISE
        assert not second.outcome.loaded
        assert first.ask(asked)[0].differs(truth) < NOISE
        assert first.outcomes()[-1] == hit(530, cpu=512)
        for _ in range(3):  # it has a stack of its own now, which its worker reaches first
            assert second.ask(asked).differs(truth) < NOISE
        assert second.outcome == hit(530, cpu=512)


def test_an_engine_that_is_killed_leaves_the_memory_to_others(engine, fork_server, model, tmp_path):
    asked = prompt(7, 530)
    with serving(tmp_path):
        with beside(fork_server, model, of(tmp_path)) as killed:
            truth = killed.ask(asked)
            os.kill(killed.pid, signal.SIGKILL)
        with engine(of(tmp_path)) as served:
            assert served.ask(asked)[0].differs(truth) < NOISE
            assert served.outcomes() == [hit(530, cpu=512)]
            served.assert_at_rest()


@pytest.mark.more
def test_ranks_of_a_restarted_engine_load_from_memory(fork_server, model, tmp_path):
    with serving(tmp_path):
        cold, *_ = run(fork_server, model, of(tmp_path), tensor_parallel_size=2)
        warm, _, outcomes, _ = run(fork_server, model, of(tmp_path), tensor_parallel_size=2)
    assert [cached for *_, cached in warm] == [512, 512] and outcomes[:2] == [hit(530, cpu=512)] * 2
    assert largest_difference(warm, cold) < NOISE


@pytest.mark.more
def test_replicas_of_one_engine_share_what_each_stored(fork_server, model, tmp_path):
    with serving(tmp_path):
        answers, outcomes, _ = one_life(fork_server, model, of(tmp_path), [(0, 80), (1, 80), (1, 81), (0, 81)])
    assert [cached for *_, cached in answers] == [0, 512, 0, 512]
    assert [*outcomes[0], *outcomes[1]].count(hit(530, cpu=512)) == 2
    assert largest_difference([answers[1], answers[3]], [answers[0], answers[2]]) < NOISE


@pytest.mark.more
def test_a_model_with_windows_and_states_restarts_warm(engine, tmp_path):
    tiny_hybrids.make("falcon_h1", tmp_path / "model")
    options = {"model": tmp_path / "model", "enable_prefix_caching": True, **OPTIONS["falcon_h1"]}
    asked, file = prompt(8, 530), of(tmp_path) | {"chunk_tokens": "auto"}
    with serving(tmp_path):
        with engine(file, **options) as first:
            truth = first.ask(asked)[0]
            first.settle()
        with engine(file, **options) as second:
            assert second.ask(asked)[0].differs(truth) < NOISE
            assert second.outcomes()[-1].loaded
            second.assert_at_rest()
