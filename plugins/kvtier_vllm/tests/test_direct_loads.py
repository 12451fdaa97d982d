"""Real vLLM whose workers read the slabs themselves: no frame passes through a slot on its way to the pages."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import pytest
from real_engines import Engine, Outcome, cpu, hit, prompt, told_by_engines
from sizes import some
from test_serving import NOISE

from kvtier_core.frames.format import header_of
from kvtier_core.types import FRAME_ALIGNMENT
from kvtier_gds.slab_files import SlabFiles

ASKED = prompt(5, 530)
HITS = 512


def slabs(tmp_path, capacity="64MiB", staging="64MiB", mode="gds"):
    paths = [str(tmp_path / name) for name in "ab"]
    return {"type": "gds", "paths": paths, "capacity": capacity, "staging": staging, "mode": mode}


def alone(*where, **room):
    return {**cpu(), "tiers": [slabs(*where, **room)]}


@pytest.fixture
def own(engine, tmp_path):
    """The answer of the engine that stored the prompt, from its own prefix cache."""
    with engine(alone(tmp_path), enable_prefix_caching=True) as first:
        first.ask(ASKED)
        (answer,) = first.own_hits(ASKED)
        first.assert_at_rest()
    assert answer.cached == HITS
    return answer


@pytest.mark.parametrize("above", [[], cpu()["tiers"]], ids=["alone", "below cpu"])
def test_direct_reads_are_bit_equal_to_the_engines_own_prefix_hit(engine, said, tmp_path, own, ranges_read, above):
    with engine({**cpu(), "tiers": [*above, slabs(tmp_path)]}, enable_prefix_caching=True) as second:
        warm = second.ask(ASKED)[0]
        second.assert_at_rest()
        lines = said()
        assert second.outcomes() == [hit(530, gds=512)]
    assert any("workers read it: if they can; mode gds" in line for line in lines)
    assert len(ranges_read) == len(set(ranges_read)) == 2 * HITS // cpu()["chunk_tokens"], (
        "each header, and each payload"
    )
    assert warm.cached == HITS
    assert warm.differs(own) == 0


@pytest.mark.parametrize("damage", some(["a bit", "another chunk's frame"], "another chunk's frame"))
def test_a_frame_that_changes_between_lookup_and_read_reaches_no_request(
    engine, said, tmp_path, own, ranges_read, monkeypatch, damage
):
    """Its request is computed, the frame is dropped, and its chunk is stored anew."""
    read = SlabFiles.read_extents

    def content(extent):
        with open(tmp_path / "ab"[extent.slab] / "kvtier.slab", "rb") as slab:
            return os.pread(slab.fileno(), extent.nbytes, extent.at)

    def write(extent, what, at=0):
        with open(tmp_path / "ab"[extent.slab] / "kvtier.slab", "r+b") as slab:
            os.pwrite(slab.fileno(), what, extent.at + at)

    def after_damage(files, extents, into):
        headers, payloads = extents[: len(extents) // 2], extents[len(extents) // 2 :]
        for at in range(1, len(headers), 3):
            if damage == "a bit":
                write(payloads[at], b"\xff", 900)
            else:
                write(headers[at], content(headers[at - 1]))
                write(payloads[at], content(payloads[at - 1]))
        monkeypatch.setattr(SlabFiles, "read_extents", read)
        return read(files, extents, into)

    monkeypatch.setattr(SlabFiles, "read_extents", after_damage)
    with engine(alone(tmp_path)) as second:
        computed = second.ask(ASKED)[0]
        second.assert_at_rest()
        assert any("corrupt" in line for line in said())
        assert computed.cached == 0
        assert computed.differs(own) < NOISE
        second.ask(ASKED)  # from memory; the slabs are offered again what was dropped
        second.assert_at_rest()
    with engine(alone(tmp_path)) as third:
        again = third.ask(ASKED)[0]
        third.assert_at_rest()
    assert again.cached == HITS
    assert again.differs(own) == 0


def test_while_places_change_hands_every_answer_is_right(engine, tmp_path, ranges_read):
    """The slabs have no room for all of the prompts, and memory for a third, so they evict all the time."""
    prompts = [prompt(seed, 330, prefix=prompt(seed % 4, 128)) for seed in range(12)]
    with engine() as plain:
        truth = plain.ask(*prompts)
    drawn = random.Random(0)
    with engine(alone(tmp_path, capacity="8MiB", staging="4MiB")) as served:
        for _ in range(5):
            order = drawn.sample(range(len(prompts)), len(prompts))
            for number, answer in zip(order, served.ask(*(prompts[each] for each in order)), strict=True):
                assert answer.differs(truth[number]) < NOISE
        served.assert_at_rest()
        assert served.manager.usage()[-1].nbytes <= 8 << 20
    assert len(ranges_read) > len(set(ranges_read)) > 8


def ask_until_a_load(model, stack):
    """In another process, which is killed in the middle of a load."""
    read = SlabFiles.read_extents

    def die(files, extents, into):
        read(files, extents[:1], into[:1])
        os.kill(os.getpid(), signal.SIGKILL)

    SlabFiles.read_extents = die
    Engine(Path(model), stack).ask(ASKED)


@pytest.mark.more
def test_an_engine_that_is_killed_in_a_load_leaves_all_that_it_had(
    engine, fork_server, model, tmp_path, own, ranges_read
):
    log = tmp_path / "log"
    fork_server.start("test_direct_loads:ask_until_a_load", log, {}, model=str(model), stack=alone(tmp_path))
    while not log.exists() or fork_server.members():
        time.sleep(0.05)
    assert "self-test: every byte came back" in log.read_text() and "Traceback" not in log.read_text()[-2000:]
    with engine(alone(tmp_path), enable_prefix_caching=True) as second:
        warm = second.ask(ASKED)[0]
        second.assert_at_rest()
    assert warm.cached == HITS and ranges_read
    assert warm.differs(own) == 0


def ask_in_processes(model, stack, options):
    """The first answer. Only what was loaded is known to be stored by all ranks, so it asks until then."""
    engine = Engine(Path(model), stack, **options)
    (answer,) = engine.ask(ASKED)
    while engine.ask(ASKED)[0].cached != HITS:
        pass
    told = told_by_engines()
    engine.llm.llm_engine.engine_core.shutdown()
    return answer.tokens, answer.logprobs, answer.cached, told


def damage_second_shards(folder):
    """Of every other frame in its slabs."""
    for path in folder.glob("*/kvtier.slab"):
        with open(path, "r+b") as slab:
            begins = [at for at in range(0, os.path.getsize(path), FRAME_ALIGNMENT) if magic(slab, at)]
            for at in begins[1::2]:
                header = header_of(memoryview(os.pread(slab.fileno(), FRAME_ALIGNMENT, at)))
                os.pwrite(slab.fileno(), b"\xff", at + FRAME_ALIGNMENT + header.payload_nbytes * 3 // 4)


def magic(slab, at):
    return os.pread(slab.fileno(), 8, at) == b"kvtier\r\n"


def test_each_rank_reads_its_shard(fork_server, model, tmp_path):
    """In processes of their own. What is damaged for one rank is computed by both."""
    environment = {
        "VLLM_WORKER_MULTIPROC_METHOD": "fork",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
    }
    arguments = {"model": str(model), "stack": alone(tmp_path), "options": {"tensor_parallel_size": 2}}
    cold, _ = fork_server.run("test_direct_loads:ask_in_processes", environment, **arguments)
    warm, log = fork_server.run("test_direct_loads:ask_in_processes", environment, **arguments)
    assert Outcome.of(warm[3][0][0]) == hit(530, gds=512) and "read into: the host's memory" in log
    assert all(f"rank {rank}: gds: read with" in log for rank in range(2))
    assert (cold[0], cold[2], warm[2]) == (warm[0], 0, HITS)
    assert max(abs(a - b) for a, b in zip(cold[1], warm[1], strict=True)) < NOISE
    damage_second_shards(tmp_path)
    computed, log = fork_server.run("test_direct_loads:ask_in_processes", environment, **arguments)
    assert "corrupt" in log and computed[2] < HITS
    assert max(abs(a - b) for a, b in zip(cold[1], computed[1], strict=True)) < NOISE
