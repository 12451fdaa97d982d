"""A tier that is opened again goes on as if it had never been closed: what leaves next is what would have left."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import random
import signal

import pytest
from patience import HANG
from serving import FRAME, Serving, files
from sizes import some

import kvtier_gds.plugin
import kvtier_policies.plugin
from kvtier_core.stack.store_tier.request_log import keys_beside
from kvtier_testing.samples import make_keys, make_namespace

PLUGINS = [kvtier_gds.plugin, kvtier_policies.plugin]
#: The order of their victims is a function of the requests, while nothing has left.
EXACT = ["arc", "fifo", "lfu", "lru", "lru2", "mru", "s3fifo", "tournament"]
#: It depends on more than requests: on what was learned before them, of which a part counts after a restart.
LEARNS = ["gittins"]
MINUTE = 60
KEYS = make_keys(2000)


def open_at(folder, policy="lru", *, frames=640, tier="disk", more=""):
    """A tier, with room for so many frames, below an arena of sixteen."""
    where = f"path: {folder / 'kv'}, min_free: 0B, io: calls"
    if tier == "gds":
        where = f"paths: [{folder / 'a'}, {folder / 'b'}], staging: {16 * FRAME}B, mode: bounce"
    folder.mkdir(exist_ok=True)
    (folder / "kvtier.yaml").write_text(
        f"version: 1\nload: always\ntiers:\n  - {{type: cpu, capacity: {16 * FRAME}B, eviction: lru}}\n"
        f"  - {{type: {tier}, {where}, capacity: {frames * FRAME}B, eviction: {policy}{more}}}\n"
    )
    return Serving(folder / "kvtier.yaml", *PLUGINS)


def conversations(seed, count=90):
    """Prompts that begin alike, continue each other, and come back."""
    draw, fresh = random.Random(seed), iter(KEYS)
    systems = [[next(fresh) for _ in range(draw.randrange(1, 4))] for _ in range(4)]
    prompts = []
    for _ in range(count):
        if not prompts or draw.random() < 0.35:
            prompts.append([*draw.choice(systems), next(fresh)])
        elif draw.random() < 0.5:
            prompts.append([*draw.choice(prompts)[:7], next(fresh)])
        else:
            prompts.append(draw.choice(prompts))
    return prompts


def victims(stack):
    """All that its store tier holds, in the order in which it would leave."""
    index = stack.manager.tiers[0].index
    return index.select_victims(len(index), lambda key: 1)


def ask(stack, paths):
    for path in paths:
        stack.ask(path)


def goes_on(stack, paths):
    """What is found, and what would leave next, while a stack serves."""
    return [(stack.ask(path), victims(stack)) for path in paths]


def uninterrupted(folder, before, after, *settings, **more):
    with open_at(folder, *settings, **more) as stack:
        ask(stack, before)
        return victims(stack), goes_on(stack, after)


def closed(folder, before, *settings, **more):
    with open_at(folder, *settings, **more) as stack:
        ask(stack, before)


def _killed(folder, before, policies, tier):
    """One life for each policy; what they were asked in their last minute is not stored."""
    stacks = [open_at(folder / policy, policy, tier=tier) for policy in policies]
    for stack in stacks:
        ask(stack, before)
        stack.wait(MINUTE)
        ask(stack, before[-1:])
    os.kill(os.getpid(), signal.SIGKILL)


def killed(folder, before, policies, tier="disk"):
    folder.mkdir(exist_ok=True)
    life = multiprocessing.get_context("spawn").Process(target=_killed, args=(folder, before, policies, tier))
    life.start()
    life.join(HANG)
    assert life.exitcode == -signal.SIGKILL


def roots_leave_last(order, prompts):
    """Whatever the policy says, no chunk leaves before one that continues it."""
    place = {key: at for at, key in enumerate(order)}
    for prompt in prompts:
        for parent, child in itertools.pairwise(prompt):
            assert child not in place or place[child] < place[parent]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("policy", EXACT)
def test_victims_are_the_same_with_and_without_a_restart(tmp_path, policy, seed):
    prompts = conversations(seed)
    before, after = prompts[:60], prompts[60:]
    expected = uninterrupted(tmp_path / "one", before, after, policy)
    closed(tmp_path / "two", before[:30], policy)
    closed(tmp_path / "two", before[30:], policy)
    with open_at(tmp_path / "two", policy) as stack:
        assert (victims(stack), goes_on(stack, after)) == expected


@pytest.mark.parametrize("tier", some(["disk", "gds"]))
def test_victims_are_the_same_after_a_kill(tmp_path, tier):
    before = conversations(7)[:60]
    killed(tmp_path, before, EXACT, tier)
    for policy in EXACT:
        expected, _ = uninterrupted(tmp_path / f"{policy} whole", before, [], policy, tier=tier)
        with open_at(tmp_path / policy, policy, tier=tier) as stack:
            assert victims(stack) == expected


@pytest.mark.parametrize("seed", some(range(3)))
def test_a_full_tier_is_the_same_with_and_without_a_restart(tmp_path, seed):
    """`lru` is a function of the requests, whatever has left."""
    prompts = conversations(seed, 700)
    before, after = prompts[:500], prompts[500:]
    expected = uninterrupted(tmp_path / "one", before, after, frames=230)
    assert len(expected[0]) < len({key for path in before for key in path})
    closed(tmp_path / "two", before, frames=230)
    with open_at(tmp_path / "two", frames=230) as stack:
        assert (victims(stack), goes_on(stack, after)) == expected


@pytest.mark.parametrize("tier", some(["disk", "gds"]))
@pytest.mark.parametrize("policy", [*EXACT, *LEARNS])
def test_roots_never_leave_before_what_hangs_on_them(tmp_path, policy, tier):
    prompts = conversations(3, 400)
    closed(tmp_path, prompts, policy, frames=400, tier=tier)
    with open_at(tmp_path, policy, frames=400, tier=tier) as stack:
        roots_leave_last(victims(stack), prompts)
        ask(stack, prompts[:20])
        roots_leave_last(victims(stack), prompts)


@pytest.mark.parametrize("tier", ["disk", "gds"])
@pytest.mark.parametrize("policy", ["lru", "lfu", "arc", "gittins"])
def test_the_most_used_prompts_survive_new_ones_after_a_restart(tmp_path, policy, tier):
    """Six system prompts with five conversations each, of which three are read again and again; then four new ones."""
    fresh = iter(KEYS)
    systems = [[next(fresh) for _ in range(6)] for _ in range(6)]
    asked = [[*system, *(next(fresh) for _ in range(10))] for system in systems for _ in range(5)]
    new = [[next(fresh) for _ in range(12)] for _ in range(4)]
    loved = asked[:3]

    def reached(stack):
        ask(stack, new)
        return sum(stack.manager.tiers[0].index.resident.run(path) for path in asked), [
            stack.manager.tiers[0].index.resident.run(path) for path in loved
        ]

    def lives(folder, restart):
        stack = open_at(folder, policy, frames=360, tier=tier)
        ask(stack, asked)
        ask(stack, loved * 4)
        if restart:
            stack.close()
            stack = open_at(folder, policy, frames=360, tier=tier)
        with stack:
            found = reached(stack)
            assert "evicted" in stack.seen
        return found

    assert lives(tmp_path / "two", restart=True) == lives(tmp_path / "one", restart=False)


# -- what the log leaves, and does not ---------------------------------------------------------------


def beside(folder):
    """The files that belong to no chunk."""
    names = {f"{key.hex()}.kv" for key in keys_beside(make_namespace().digest)}
    return [file for file in files(folder / "kv") if file.name in names]


def test_a_tier_of_another_size_leaves_nothing_of_the_log_of_before(tmp_path):
    prompts = conversations(4, 200)
    closed(tmp_path, prompts, frames=640)
    lengths = {file.stat().st_size for file in beside(tmp_path)}
    closed(tmp_path, prompts, frames=230)
    assert beside(tmp_path) and lengths.isdisjoint(file.stat().st_size for file in beside(tmp_path))
    closed(tmp_path, prompts, frames=100)
    assert not beside(tmp_path), "it is too small for a log"


def test_no_epoch_leaves_a_log(tmp_path):
    """The keys of an epoch mean nothing to a later process, and those of before count no more."""
    prompts = conversations(5)
    closed(tmp_path, prompts)
    with open_at(tmp_path) as stack:
        stack.manager.invalidate_all(make_namespace().renewed())
        ask(stack, prompts)
        stack.wait(MINUTE)
        assert not beside(tmp_path)
        stack.manager.invalidate_all(make_namespace())
        ask(stack, prompts[:9])
    assert beside(tmp_path)
    with open_at(tmp_path) as stack:
        assert set(victims(stack)) == {key for path in prompts[:9] for key in path}


def test_the_log_is_erased_with_chunks(tmp_path):
    """A key is a digest of what was said: it could confirm a guess."""
    prompts = conversations(6)
    closed(tmp_path, prompts)
    with open_at(tmp_path) as stack:
        tier, erased = stack.manager.tiers[0], prompts[0]
        assert tier.erase(erased) == len(erased) and tier.erasing
        stack.wait(1)
        assert not tier.erasing
        ask(stack, prompts[1:3])
    written = b"".join(file.read_bytes() for file in beside(tmp_path))
    assert prompts[2][-1] in written and erased[-1] not in written
