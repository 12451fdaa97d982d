"""Real vLLM engines whose workers read the slabs of a server, in a process of its own."""

from __future__ import annotations

import contextlib
import json
import time

import pytest
from patience import HANG
from real_engines import hit, prompt
from sizes import some
from test_direct_loads import ASKED, HITS, slabs
from test_processes import largest_difference, run
from test_server import NOISE, of, serving

from kvtier_gds.slab_files import SlabFiles

#: Asked while no server may be there: a prompt that a server has missed is stored in its memory, before the slabs.
ANOTHER = prompt(77, 530)

#: Extents that a worker reads for the prompt: of each chunk the header and the payload.
READ = 2 * HITS // 64


def served_slabs(folder, mode="gds"):
    """The tier as the server's file has it."""
    return json.dumps(slabs(folder, mode=mode))


@pytest.fixture
def stored(engine, tmp_path):
    """An engine's answer from its own prefix cache; a server that ended has the prompt in its slabs."""
    with serving(tmp_path, served_slabs(tmp_path)), engine(of(tmp_path), enable_prefix_caching=True) as first:
        first.ask(ASKED)
        (answer,) = first.own_hits(ASKED)
        first.assert_at_rest()
    assert answer.cached == HITS
    return answer


def test_reads_from_slabs_of_a_server_are_bit_equal_to_the_engines_own_prefix_hit(
    engine, said, tmp_path, stored, ranges_read
):
    with serving(tmp_path, served_slabs(tmp_path)), engine(of(tmp_path), enable_prefix_caching=True) as second:
        warm = second.ask(ASKED)[0]
        second.assert_at_rest()
        lines = said()
        assert second.outcomes() == [hit(530, gds=512)]
    assert any("workers read it: if they can; mode gds" in line for line in lines)
    assert any("gds: read into: the host's memory" in line for line in lines)
    assert len(ranges_read) == len(set(ranges_read)) == READ
    assert warm.cached == HITS
    assert warm.differs(stored) == 0


def test_workers_read_on_when_the_server_is_killed_and_then_read_frames_of_the_next(
    engine, tmp_path, stored, ranges_read, monkeypatch
):
    read = SlabFiles.read_extents
    with contextlib.ExitStack() as closing:
        killed = closing.enter_context(serving(tmp_path, served_slabs(tmp_path)))
        served = closing.enter_context(engine(of(tmp_path), enable_prefix_caching=False))

        def after_a_kill(files, extents, into):
            monkeypatch.setattr(SlabFiles, "read_extents", read)
            killed.kill()
            killed.wait()
            return read(files, extents, into)

        monkeypatch.setattr(SlabFiles, "read_extents", after_a_kill)
        assert served.ask(ASKED)[0].differs(stored) == 0
        assert served.outcomes()[-1] == hit(530, gds=512)
        assert killed.returncode and served.ask(ASKED)[0].differs(stored) < NOISE
        assert "no session of the server" in served.outcomes()[-1].why
        with serving(tmp_path, served_slabs(tmp_path)):
            before, deadline = len(ranges_read), time.monotonic() + HANG
            while served.ask(ANOTHER) and "the server at" in served.outcomes()[-1].why:
                assert time.monotonic() < deadline, "the engine does not find the server that came in its place"
            assert served.ask(ASKED)[0].differs(stored) < NOISE
            assert served.outcomes()[-1] == hit(530, gds=512)
            assert len(ranges_read) == before + READ
            served.assert_at_rest()


def test_an_engine_that_is_killed_in_a_load_leaves_the_slabs_to_others(
    engine, fork_server, model, tmp_path, stored, ranges_read
):
    log = tmp_path / "log"
    with serving(tmp_path, served_slabs(tmp_path)):
        fork_server.start("test_direct_loads:ask_until_a_load", log, {}, model=str(model), stack=of(tmp_path))
        while not log.exists() or fork_server.members():
            time.sleep(0.05)
        assert "self-test: every byte came back" in log.read_text() and "Traceback" not in log.read_text()[-2000:]
        with engine(of(tmp_path), enable_prefix_caching=True) as second:
            warm = second.ask(ASKED)[0]
            second.assert_at_rest()
    assert warm.cached == HITS and ranges_read
    assert warm.differs(stored) == 0


@pytest.mark.parametrize(("mode", "policy"), some([("gds", "fail"), ("auto", "recompute")]))
def test_an_engine_that_does_not_read_by_itself_gets_no_stored_frames(
    engine, tmp_path, stored, ranges_read, mode, policy
):
    """It fails requests whose load fails; or its workers refuse, since there is no GPU to read into."""
    with (
        serving(tmp_path, served_slabs(tmp_path, mode)),
        engine(of(tmp_path), enable_prefix_caching=True, kv_load_failure_policy=policy) as second,
    ):
        warm = second.ask(ASKED)[0]
        assert second.outcomes() == [hit(530, gds=512)]
        second.assert_at_rest()
    assert warm.differs(stored) == 0 and not ranges_read


@pytest.mark.more
def test_each_rank_reads_its_shard_of_the_slabs_of_a_server(fork_server, model, tmp_path):
    answers = []
    for _ in range(2):
        with serving(tmp_path, served_slabs(tmp_path)):
            answers.append(run(fork_server, model, of(tmp_path), tensor_parallel_size=2))
    (cold, *_), (warm, _, outcomes, log) = answers
    assert warm[0][-1] == HITS and outcomes[0] == hit(530, gds=512)
    assert all(f"rank {rank}: gds: read with" in log for rank in range(2))
    assert largest_difference(warm, cold) < NOISE
