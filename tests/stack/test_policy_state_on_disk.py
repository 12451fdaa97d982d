"""What a disk tier's policy learned, in a real folder: warm after a restart, and never at the cost of a chunk."""

from __future__ import annotations

import multiprocessing
import os
import signal
from typing import ClassVar

import attrs
import pytest
from patience import HANG
from serving import FRAME, Serving, files

from kvtier_core.hookspecs import hookimpl
from kvtier_core.policies.gittins import GittinsConfig
from kvtier_core.stack.store_tier.policy_state import PolicyState, key_of
from kvtier_core.types import FRAME_ALIGNMENT
from kvtier_testing.samples import make_keys, make_namespace

KEYS = make_keys(24)
#: Paths that share nothing; memory has room for one of them.
PATHS = [KEYS[i : i + 4] for i in range(0, len(KEYS), 4)]
FIRST, SECOND = PATHS[:3], PATHS[3:]
COLD = GittinsConfig().open().save()


@attrs.frozen
class WatchedConfig(GittinsConfig):
    """`git`, and whoever opened a stack last can ask it what it knows."""

    type: ClassVar[str] = "watched"
    opened: ClassVar[list] = []

    def open(self):
        self.opened.append(super().open())
        return self.opened[-1]


class Watched:
    @hookimpl
    def kvtier_eviction_policies(self):
        return [WatchedConfig]


@pytest.fixture(autouse=True)
def closed():
    """No policy outlives the interpreter, whose leak report would name it."""
    yield
    WatchedConfig.opened.clear()


def knows():
    return WatchedConfig.opened[-1].save()


def warm(learned):
    """What a policy knows that was given this."""
    policy = GittinsConfig().open()
    policy.restore(learned)
    return policy.save()


def open_stack_at(folder):
    """`io: calls`, so that a test can stop a write half-way. Too small for a log, from which the policy learns, too."""
    (folder / "kvtier.yaml").write_text(
        f"version: 1\ntiers:\n  - {{type: cpu, capacity: {4 * FRAME}B, eviction: lru}}\n"
        f"  - {{type: disk, path: {folder / 'kv'}, capacity: 4MiB, min_free: 0B, io: calls, eviction: watched}}\n"
    )
    return Serving(folder / "kvtier.yaml", Watched())


def serve(stack, paths):
    """All of them, three times: `git` learns from what comes back."""
    for path in paths * 3:
        stack.ask(path)


def first_life(folder):
    """What the policy knew when its stack was closed in good order."""
    with open_stack_at(folder) as stack:
        serve(stack, FIRST)
    return knows()


def memo_in(folder):
    (file,) = folder.rglob(f"{key_of(make_namespace().digest).hex()}.kv")
    return file


def nothing_is_lost(stack, paths):
    assert [stack.ask(path) for path in paths] == [len(path) for path in paths]
    assert not stack.seen & {"io_error", "missing", "corrupt", "breaker_open", "rejected"}


def test_a_restart_is_warm(tmp_path):
    learned = first_life(tmp_path)
    with open_stack_at(tmp_path) as stack:
        assert knows() == warm(learned) != COLD
        nothing_is_lost(stack, FIRST)
        serve(stack, SECOND)
    more = knows()
    with open_stack_at(tmp_path) as stack:
        assert knows() == warm(more) != warm(learned)
        nothing_is_lost(stack, PATHS)


def test_the_policy_state_is_not_a_chunk(tmp_path):
    """It takes room in the folder, and none in the index."""
    first_life(tmp_path)
    with open_stack_at(tmp_path) as stack:
        assert stack.manager.usage()[1].chunks == sum(map(len, FIRST)) == len(files(tmp_path / "kv")) - 1


def flipped(at):
    def flip(frame):
        frame[at] ^= 1
        return frame

    return flip


#: What becomes of the file between two lives.
DAMAGE = {
    "a byte of its magic": flipped(0),
    "a byte of its key": flipped(60),
    "a byte of what was learned": flipped(FRAME_ALIGNMENT + 100),
    "the last byte of it": flipped(FRAME_ALIGNMENT + len(COLD) - 1),
    "nothing is left of it": lambda frame: b"",
    "half of the header": lambda frame: frame[:2048],
    "the header alone": lambda frame: frame[:FRAME_ALIGNMENT],
    "without its last page": lambda frame: frame[:-FRAME_ALIGNMENT],
    "a byte short": lambda frame: frame[:-1],
    "a page too long": lambda frame: frame + bytes(FRAME_ALIGNMENT),
    "zeros": lambda frame: bytes(len(frame)),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_memory_is_a_cold_start(tmp_path, damage):
    first_life(tmp_path)
    file = memo_in(tmp_path)
    file.write_bytes(DAMAGE[damage](bytearray(file.read_bytes())))
    with open_stack_at(tmp_path) as stack:
        assert knows() == COLD
        nothing_is_lost(stack, FIRST)
        serve(stack, FIRST)
    learned = knows()
    with open_stack_at(tmp_path):
        assert knows() == warm(learned) != COLD


def test_a_chunk_in_the_place_of_the_memory_is_a_cold_start(tmp_path):
    first_life(tmp_path)
    file = memo_in(tmp_path)
    (chunk,) = tmp_path.rglob(f"{KEYS[0].hex()}.kv")
    file.write_bytes(chunk.read_bytes())
    with open_stack_at(tmp_path) as stack:
        assert knows() == COLD
        nothing_is_lost(stack, FIRST)


def test_a_memory_that_was_removed_is_a_cold_start(tmp_path):
    first_life(tmp_path)
    memo_in(tmp_path).unlink()
    with open_stack_at(tmp_path) as stack:
        assert knows() == COLD
        nothing_is_lost(stack, FIRST)


# -- kill -9 ---------------------------------------------------------------------------------------


def _killed_at_work(folder):
    stack = open_stack_at(folder)
    serve(stack, SECOND)
    os.kill(os.getpid(), signal.SIGKILL)


def _killed_while_it_writes_what_it_learned(folder):
    stack = open_stack_at(folder)
    serve(stack, SECOND)
    pwritev = os.pwritev

    def half(fd, views, at):
        pwritev(fd, [views[0][: len(views[0]) // 2 // FRAME_ALIGNMENT * FRAME_ALIGNMENT]], at)
        os.kill(os.getpid(), signal.SIGKILL)

    os.pwritev = half
    stack.close()


def _killed_after_a_minute(folder):
    """It leaves beside its store what its policy had learned when that was kept last."""
    stack = open_stack_at(folder)
    write = PolicyState._write

    def told(state, saved):
        (folder / "saved").write_bytes(saved)
        write(state, saved)

    PolicyState._write = told
    for _ in range(7):  # a bit more than 60 requests, a second each
        serve(stack, SECOND)
    os.kill(os.getpid(), signal.SIGKILL)


KILLED = [_killed_at_work, _killed_while_it_writes_what_it_learned]


def killed_life(life, folder):
    engine = multiprocessing.get_context("spawn").Process(target=life, args=(folder,))
    engine.start()
    engine.join(HANG)
    assert engine.exitcode == -signal.SIGKILL


@pytest.mark.parametrize("life", KILLED)
def test_a_killed_engine_leaves_the_state_of_its_predecessor(tmp_path, life):
    learned = first_life(tmp_path)
    killed_life(life, tmp_path)
    with open_stack_at(tmp_path) as stack:
        assert knows() == warm(learned) != COLD
        assert not list(tmp_path.rglob("*.tmp"))
        nothing_is_lost(stack, PATHS)


@pytest.mark.parametrize("life", KILLED)
def test_an_engine_killed_in_its_first_run_leaves_no_state(tmp_path, life):
    killed_life(life, tmp_path)
    with open_stack_at(tmp_path) as stack:
        assert knows() == COLD
        nothing_is_lost(stack, SECOND)


def test_a_killed_engine_leaves_its_state_of_a_minute_ago(tmp_path):
    killed_life(_killed_after_a_minute, tmp_path)
    with open_stack_at(tmp_path) as stack:
        assert knows() == warm((tmp_path / "saved").read_bytes()) != COLD
        nothing_is_lost(stack, SECOND)


def test_an_epoch_leaves_no_memory_of_its_own(tmp_path):
    """The policy learned of requests, not of weights; and no other engine could ever find what an epoch named."""
    with open_stack_at(tmp_path) as stack:
        stack.manager.invalidate_all(make_namespace().renewed())
        for _ in range(30):
            serve(stack, FIRST[:1])
        assert memo_in(tmp_path) in files(tmp_path / "kv")
        stack.manager.invalidate_all(make_namespace())
        stack.settle()
    assert files(tmp_path / "kv") == [memo_in(tmp_path)]
