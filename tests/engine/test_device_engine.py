"""An engine whose device does everything late and in the worst order: no forward ever reads wrong KV, nothing is left.

On a GPU the same engine runs in `make gpu-check`.
"""

from __future__ import annotations

import zlib

import attrs
import pytest
from device_engine import on_gpu
from device_engine.bugs import BUGS
from device_engine.engine import Engine, WorkerDied, WrongKV, run
from device_engine.setup import Setup
from sizes import some

from kvtier_core.frames.format import header_of, payload_of

KINDS = {
    "as it is": Setup(),
    "copies fail half-way": Setup(failures=0.05),
    "two ranks": Setup(ranks=2),
    "memory that is unmapped in its sleep": Setup(sleeps=True),
    "one block a chunk, one layer": Setup(block_tokens=8, token_words=(3,), blocks=30),
    "layers side by side": Setup(block_major=True),
    "layers side by side, one block a chunk": Setup(block_major=True, block_tokens=8, blocks=30),
    "two arenas": Setup(slots=10, slots_below=60),
    "packed slots": Setup(packs=True, token_words=(128, 64)),
    "new blocks are zeroed, and stores fenced at once": Setup(zeroes=True),
}
REQUESTS = 400
#: In so many a planted bug must be noticed.
MOST_REQUESTS = 1000


@pytest.mark.parametrize("kind", KINDS)
def test_no_forward_reads_wrong_kv_and_nothing_is_left(kind):
    tally = run(attrs.evolve(KINDS[kind], seed=1), REQUESTS)
    assert tally.requests == REQUESTS
    assert tally.loaded_tokens > tally.asked_tokens / 4
    assert min(tally.aborted, tally.preempted, tally.fenced) > 20
    assert bool(tally.failed_loads) == bool(KINDS[kind].failures)
    assert bool(tally.sleeps) == KINDS[kind].sleeps


@pytest.mark.parametrize("name", [name for name, bug in BUGS.items() if bug.rule])
def test_each_rule_is_needed(name):
    with pytest.raises((WrongKV, WorkerDied)):
        run(Setup(seed=1, bug=name, **BUGS[name].setup), MOST_REQUESTS)


@pytest.mark.parametrize("ranks", [1, 2])
def test_frames_are_sealed_with_what_the_device_computed(tmp_path, ranks):
    tally = run(Setup(seed=1, ranks=ranks, staged=True, disk=tmp_path), 100)
    frames = [memoryview(file.read_bytes()) for file in tmp_path.rglob("*.kv")]
    assert tally.checksums >= len(frames) > 20
    for frame in frames:
        payload = payload_of(frame)[: header_of(frame).payload_nbytes]
        assert header_of(frame).payload_checksum == zlib.crc32(payload)


def test_a_seed_is_a_run():
    assert run(Setup(seed=5), 50) == run(Setup(seed=5), 50) != run(Setup(seed=6), 50)


# -- a worker that dies ------------------------------------------------------------------------------------


def killed_in_mid_copy(setup: Setup) -> None:
    """An engine serves until a store is under way, and one of its workers is gone."""
    with Engine(setup) as engine:
        engine.serve(40)
        engine.serve(400, until=lambda: engine.side._stores.jobs)
        engine.kill(setup.ranks - 1)
        with pytest.raises(WorkerDied, match=f"^rank {setup.ranks - 1} ended with -9$"):
            engine.serve(1)
        assert engine.side._stores.jobs, "what was not reported is not READY"


def found_by_the_next(setup: Setup) -> int:
    """Tokens that an engine loads which begins with what the killed one left on the disk."""
    return run(attrs.evolve(setup, bug=""), 60).loaded_tokens


@pytest.mark.parametrize("ranks", some([1, 2]))
def test_no_torn_chunk_is_served_after_a_worker_is_killed(tmp_path, ranks):
    for seed in range(3):
        setup = Setup(seed=seed, ranks=ranks, disk=tmp_path)
        killed_in_mid_copy(setup)
        assert found_by_the_next(setup)


def test_the_harness_notices_a_torn_chunk(tmp_path):
    setup = Setup(bug="a store is reported before its event", disk=tmp_path)
    with pytest.raises(WrongKV):
        for seed in range(20):
            killed = attrs.evolve(setup, seed=seed)
            killed_in_mid_copy(killed)
            found_by_the_next(killed)


# -- the engines that a GPU is checked with ------------------------------------------------------------------


@pytest.mark.parametrize("kind", some(on_gpu.KINDS))
def test_the_gpu_harness_runs_here(kind):
    setup = on_gpu.KINDS[kind]
    here = attrs.evolve(setup, device="cpu", slots=min(setup.slots, 40))
    assert run(here, 6).requests == 6
