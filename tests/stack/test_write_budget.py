"""`writes: {per_day: …}`: a store tier writes no more than that, and first what returns most often."""

from __future__ import annotations

import attrs
import pytest
from benches import FRAME as BENCH_FRAME
from benches import TierBench
from serving import FRAME, LAYOUT, Serving, files

import kvtier_cpu.plugin
import kvtier_disk.plugin
from kvtier_core.config.load import load_config
from kvtier_core.config.open import open_stack
from kvtier_core.config.registry import Registry
from kvtier_core.errors import ConfigError
from kvtier_core.stack.index.write_budget import WriteBudget
from kvtier_testing.samples import make_context, make_keys

DAY = 86400
BURST = 8
KEYS = make_keys(400)
ONE, TWO = KEYS[:4], KEYS[4:8]
SPENT = "its write budget is spent"


class Clocked:
    """A budget of one byte a second, at a time that the test sets."""

    def __init__(self, burst=100):
        self.now = 0.0
        self.budget = WriteBudget(DAY, burst, None, lambda: self.now)


def test_bytes_accumulate_up_to_the_burst():
    clocked, left = Clocked(), []
    for clocked.now in (0, 10.5, 100, 5000):
        left.append(clocked.budget.left)
    assert left == [0, 10, 100, 100]
    clocked.budget.spend(30)
    assert clocked.budget.left == 70
    clocked.now += 20
    assert clocked.budget.left == 90
    clocked.budget.spend(-50)
    assert clocked.budget.left == 100, "bytes that are given back do not exceed the burst"


def test_a_chunk_that_n_requests_have_named_may_use_all_but_one_nth_power_of_two():
    clocked = Clocked(burst=64)
    clocked.now = 64
    for requests, affordable in ((0, 32), (1, 32), (2, 48), (3, 56), (6, 63), (1000, 63)):
        assert clocked.budget.affords([requests] * 100, 1) == affordable
    assert clocked.budget.affords([3, 3, 1, 3], 20) == 2, "the chunks after one that is too dear are refused, too"


def test_until_the_first_burst_half_of_what_has_accumulated_is_for_chunks_named_once():
    clocked = Clocked(burst=1 << 40)
    for clocked.now in (0, 10, 1000):
        assert clocked.budget.affords([1] * 2000, 1) == clocked.now // 2


@pytest.fixture
def serving(tmp_path):
    """Opens a stack of memory for twelve chunks and a disk to which one frame a second may be written."""

    def serving(more=""):
        file = tmp_path / "kvtier.yaml"
        writes = f"{{per_day: {DAY * FRAME}B, burst: {BURST * FRAME}B}}"
        disk = f"{{type: disk, path: {tmp_path / 'kv'}, capacity: 1GiB, min_free: 0B, writes: {writes}{more}}}"
        file.write_text(f"version: 1\ntiers:\n  - {{type: cpu, capacity: {12 * FRAME}B}}\n  - {disk}")
        return Serving(file)

    return serving


def on_disk(stack):
    return stack.manager.usage()[1].chunks


def test_no_sequence_of_starts_writes_more_than_the_rate(serving):
    fresh, seconds = zip(*[iter(KEYS)] * 4, strict=True), 0
    for start in range(1, 5):
        with serving() as stack:
            for _ in range(20):
                seconds += 1
                stack.ask(list(next(fresh)))
                assert on_disk(stack) <= seconds
        assert on_disk(stack) >= seconds - start * BURST // 2, "what may be written is written"


def test_chunks_that_two_requests_have_named_come_first(serving, tmp_path):
    with serving() as stack:
        stack.wait(100)
        assert [stack.ask(path) for path in (ONE, TWO)] == [0, 0]
        assert on_disk(stack) == 5, "half of the burst, and one more a second later"
        assert stack.ask(TWO) == 4
        stack.settle()
        assert on_disk(stack) == 8
        assert {file.stem for file in files(tmp_path / "kv")} == {key.hex() for key in (*ONE, *TWO)}
        assert "rejected" in stack.seen


def test_what_was_refused_is_written_when_it_is_named_again_and_bytes_have_accumulated(serving):
    with serving() as stack:
        assert stack.ask(ONE) == 0 and on_disk(stack) == 0
        stack.wait(100)
        assert stack.ask(ONE) == 4
        stack.settle()
        assert on_disk(stack) == 4


def test_what_compression_saves_may_be_written_later(serving, tmp_path):
    pytest.importorskip("zstandard")
    with serving(", serializer: zstd") as stack:
        stack.wait(100)
        stack.ask(ONE)
        use = stack.manager.usage()[1].writes
        assert use.written == sum(file.stat().st_size for file in files(tmp_path / "kv")) < 4 * FRAME
        assert use.left == BURST * FRAME - use.written
        assert (use.per_day, use.endurance, use.seconds) == (DAY * FRAME, None, 101)


def test_frames_that_the_budget_no_longer_allows_are_refused_before_they_are_written():
    """Two stores may be planned before one of them is written."""
    bench = TierBench(frames=40, burst=2)
    bench.now = 100
    bench.write(*KEYS[:3])
    bench.settle()
    assert bench.has(*KEYS[:3]) == [True, True, False]
    assert bench.released == [*KEYS[2:3], *KEYS[:2]]
    assert SPENT in bench.whys()


def test_a_write_that_failed_counts():
    bench = TierBench(frames=40, burst=4)
    bench.now = 100
    bench.shelf.fails = True
    bench.write(*KEYS[:3])
    bench.settle()
    assert not any(bench.has(*KEYS[:3]))
    assert bench.budget.left == BENCH_FRAME


def test_a_write_that_never_began_does_not_count():
    bench = TierBench(frames=40, inflight=5, burst=8)
    bench.now = 100
    for key in KEYS[:6]:
        bench.write(key)
    assert "it waited for a store that is too slow" in bench.whys()
    assert bench.budget.left == 3 * BENCH_FRAME
    bench.settle()
    assert sum(bench.has(*KEYS[:6])) == 5


def opened(tmp_path, writes, replicas=1):
    file = tmp_path / "kvtier.yaml"
    disk = f"{{type: disk, path: {tmp_path / 'kv'}, capacity: 1GiB, min_free: 0B, writes: {writes}}}"
    file.write_text(f"version: 1\ntiers:\n  - {{type: cpu, capacity: {replicas * 12 * FRAME}B}}\n  - {disk}")
    config = load_config(file, Registry.of(kvtier_cpu.plugin, kvtier_disk.plugin))
    return open_stack(config, attrs.evolve(make_context(layout=LAYOUT), replica=0, replicas=replicas))


def test_replicas_divide_what_may_be_written(tmp_path):
    manager = opened(tmp_path, f"{{per_day: {96 * FRAME}B, endurance: 7PiB}}", replicas=2)
    use = manager.usage()[1].writes
    assert (use.per_day, use.endurance) == (48 * FRAME, 7 << 50)
    manager.close()


@pytest.mark.parametrize("writes", [f"{{per_day: {47 * FRAME}B}}", f"{{per_day: 1TiB, burst: {2 * FRAME - 1}B}}"])
def test_a_burst_without_room_for_two_chunks_is_refused(tmp_path, writes):
    with pytest.raises(ConfigError, match=r"tiers\[1\]\.writes: its burst, .*, is smaller than two chunks"):
        opened(tmp_path, writes)


def test_a_limit_of_nothing_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"writes\.per_day: .*greater than 0B"):
        opened(tmp_path, "{per_day: 0B}")
