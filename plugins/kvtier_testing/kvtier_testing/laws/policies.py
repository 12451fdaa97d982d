"""The laws of an eviction policy. Subclass `PolicyLaws` and name a config."""

from __future__ import annotations

import functools
import gc
import itertools
import os
import random
import tracemalloc
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier_core.interfaces import MAX_POLICY_STATE_NBYTES, EvictionConfig, EvictionPolicy, SupportsSparing
from kvtier_core.types import ChunkKey
from kvtier_testing.laws.base import Laws, in_new_process
from kvtier_testing.laws.histories import (
    KEYS,
    NBYTES,
    Step,
    after,
    full_policy,
    history,
    live,
    replace_all,
    tell_all,
    victims_after,
    work_of,
)
from kvtier_testing.samples import make_key, make_keys

_SEEDS = range(50)
_WHICH = st.integers(0, len(KEYS) - 1)
_HISTORIES = st.lists(
    st.one_of(
        st.tuples(st.just("request"), st.lists(_WHICH, min_size=1, max_size=6, unique=True)),
        st.tuples(st.just("admit"), _WHICH),
        st.tuples(st.just("forget"), _WHICH),
        st.tuples(st.just("evict"), st.integers(1, 4)),
    ),
    max_size=60,
)
_EXAMPLES = settings(max_examples=150, deadline=None, database=None)

#: Keys that are held when work is counted: four times as many may take eight times the work, for a sort or a heap
#: takes a little more than its share. Work that grows with the square would be sixteen times as much.
_SOME, _MORE, _FACTOR, _FREE = 64, 256, 8, 200


class PolicyLaws(Laws[EvictionConfig]):
    """Subclass, and implement `config`."""

    contract = "kvtier_core.interfaces.eviction"

    def test_victims_are_the_held_keys_each_once(self, tmp_path: Path) -> None:
        """`victims` names each held key once, and nothing else.

        Otherwise chunks that are never named would stay for ever: the tier would find no room, and store nothing any
        more.
        """

        @_EXAMPLES
        @given(_HISTORIES)
        def holds(steps: list[Step]) -> None:
            policy, held = self.config(tmp_path).open(), set[ChunkKey]()
            for now, step in enumerate(steps):
                live(policy, held, step, now)
                victims = list(policy.victims())
                assert len(victims) == len(set(victims)), "victims() names a key twice"
                assert not set(victims) - held, "victims() names a key that is not held"
                assert not held - set(victims), "victims() leaves out a held key, which could then never be evicted"

        holds()

    def test_asking_for_victims_changes_nothing(self, tmp_path: Path) -> None:
        """A second call has the same answer.

        Otherwise each look at the victims, and a decision takes many, would change what is evicted.
        """

        @_EXAMPLES
        @given(_HISTORIES)
        def holds(steps: list[Step]) -> None:
            policy, held = self.config(tmp_path).open(), set[ChunkKey]()
            for now, step in enumerate(steps):
                live(policy, held, step, now)
            assert list(policy.victims()) == list(policy.victims()), "a second call of victims() has another answer"

        holds()

    def test_the_same_history_has_the_same_victims(self, tmp_path: Path) -> None:
        """A policy reads no clock and draws no random numbers without a seed.

        Otherwise what `kvtier simulate` shows would not be what an engine does.
        """
        first, second = (victims_after(self.config(tmp_path), _SEEDS) for _ in range(2))
        assert first == second, "two policies that saw the same calls name other victims"

    def test_every_process_has_the_same_victims(self, tmp_path: Path) -> None:
        """Victims are the same with any PYTHONHASHSEED: the order of a set decides nothing.

        Otherwise two runs of one trace would differ, and no measurement of the policy would mean anything.
        """
        seed = 1 if os.environ.get("PYTHONHASHSEED") != "1" else 2
        here = victims_after(self.config(tmp_path), _SEEDS)
        there = in_new_process(victims_after, self.config(tmp_path), _SEEDS, hash_seed=seed)
        assert there == here, (
            f"after the same calls a process with PYTHONHASHSEED={seed} names other victims; "
            "does something depend on the order of a set, or on hash()?"
        )

    def test_victims_may_be_left_halfway(self, tmp_path: Path) -> None:
        """A tier takes a few victims, drops the iterator, and changes what is held.

        Otherwise the second eviction would raise on the thread that the engine waits for, and the tier would be given
        up.
        """
        policy, held = self.config(tmp_path).open(), set()
        for key in KEYS:
            policy.admit(key, NBYTES)
            held.add(key)
        for now in range(len(held)):
            chosen = next(policy.victims())
            policy.forget(chosen, evicted=bool(now % 2))
            held.discard(chosen)
            policy.request(KEYS[now % 4 :: 3], float(now), {})
            assert set(policy.victims()) == held, (
                "after an iterator over victims was dropped, victims() names others than the held keys"
            )

    def test_victims_take_no_quadratic_work(self, tmp_path: Path) -> None:
        """Victims take no quadratic work: a tier may hold a million chunks. Operations on keys and lines count, not
        seconds.

        Otherwise the engine would stand still for seconds whenever a large tier makes room.
        """
        for task, action in {
            "telling all victims once": tell_all,
            "replacing each held key, one by one, by a newcomer": replace_all,
        }.items():
            few, many = (
                work_of(functools.partial(action, full_policy(self.config(tmp_path), count), count))
                for count in (_SOME, _MORE)
            )
            assert many <= _FACTOR * few + _FREE, (
                f"{task} takes {few} steps when {_SOME} keys are held and {many} when {_MORE} are: for "
                f"{_MORE // _SOME} times the keys it may be {_FACTOR} times as many"
            )

    def test_what_is_spared_is_no_victim_until_its_turn_comes_back(self, tmp_path: Path) -> None:
        """With `SupportsSparing`, `victims` names each held key that is not spared once, whatever requests name.

        Otherwise the tier would walk past spared keys again, evict one twice, or never evict one whose children have
        left.
        """
        for seed in _SEEDS:
            policy = after(self.config(tmp_path).open(), seed)
            if not isinstance(policy, SupportsSparing):
                return
            for key in sorted(set(KEYS).difference(policy.victims())):
                policy.admit(key, NBYTES)
            first, second, *others = victims = list(policy.victims())
            for key in victims[: len(victims) // 2]:
                policy.spare(key)
            policy.request(KEYS, 1000.0, {})
            policy.request(KEYS, 1001.0, {})
            left = victims[len(victims) // 2 :]
            assert sorted(policy.victims()) == sorted(left), "victims() names a spared key, or leaves out another one"
            policy.forget(first, evicted=True)
            policy.unspare(second)
            for key in others[: len(victims) // 2 - 2]:
                policy.unspare(key)
            assert sorted(policy.victims()) == sorted([second, *others]), (
                "after their children have left victims() does not name each of the keys that were spared, once"
            )

    def test_prefers_changes_nothing(self, tmp_path: Path) -> None:
        """The same question has the same answer, and the same victims follow.

        Otherwise a chunk that is asked about for each of its tiers would seem to be used more often than it is.
        """
        for seed in _SEEDS:
            asked, other = (after(self.config(tmp_path).open(), seed) for _ in range(2))
            victims = list(asked.victims())
            answers = [[asked.prefers(key, victim) for key in KEYS for victim in reversed(victims)] for _ in range(2)]
            assert answers[0] == answers[1], "prefers() answers the same questions otherwise the second time"
            assert list(asked.victims()) == victims == list(other.victims()), "prefers() changed the victims"
            for policy in (asked, other):
                policy.request(KEYS[:5], 1000.0, {})
            assert list(asked.victims()) == list(other.victims()), "prefers() changed what a later request leads to"

    def test_a_full_tier_does_not_stay_closed(self, tmp_path: Path) -> None:
        """A policy may refuse newcomers, but admits one that is requested all the time while no held key is.

        Otherwise a tier that was full once would keep yesterday's prompts for ever, and never serve today's.
        """
        policy, (newcomer, *held) = self.config(tmp_path).open(), make_keys(9)
        policy.request(held, 0.0, {})
        for key in reversed(held):
            policy.admit(key, NBYTES)
        for now in range(10, 2000, 10):
            policy.request([newcomer], float(now), {})
            if policy.prefers(newcomer, next(iter(policy.victims()))):
                return
        raise AssertionError(
            "a key that each of the last 199 requests named is never preferred to the first victim, which none of "
            "them named: once a tier is full, nothing is ever admitted"
        )

    def test_saved_state_is_small_and_safe_to_restore(self, tmp_path: Path) -> None:
        """A policy accepts the state of another one, and its victims are still the held keys.

        Otherwise a restart would lose what was learned, or a tier could not be opened with the state of an older
        release.
        """
        saved = after(self.config(tmp_path).open(), 0).save()
        assert isinstance(saved, bytes), f"save() returns bytes; it returned {type(saved).__name__}"
        assert len(saved) <= MAX_POLICY_STATE_NBYTES, (
            f"save() returns at most {MAX_POLICY_STATE_NBYTES} bytes; it returned {len(saved)}"
        )
        others = [self.config(tmp_path).open(), *(after(self.config(tmp_path).open(), seed) for seed in range(1, 9))]
        lengths = {len(saved), *(len(other.save()) for other in others)}
        assert len(lengths) == 1, f"save() always returns the same number of bytes; it returned {sorted(lengths)}"
        for memory in (saved, *_garbage(saved)):
            policy, held = self.config(tmp_path).open(), set[ChunkKey]()
            policy.restore(memory)
            for now, step in enumerate(history(1)):
                live(policy, held, step, now)
                assert sorted(policy.victims()) == sorted(held), "after restore() victims() are not the held keys"

    def test_garbage_teaches_nothing(self, tmp_path: Path) -> None:
        """Bytes that no such policy ever saved raise nothing and change nothing.

        Otherwise one damaged file would keep the engine from opening the tier.
        """
        saved = after(self.config(tmp_path).open(), 0).save()
        for garbage in _garbage(saved):
            taught, untaught = self.config(tmp_path).open(), self.config(tmp_path).open()
            taught.restore(garbage)
            seen = f"after restore() of {len(garbage)} bytes that save() never returned (save() returns {len(saved)})"
            assert taught.save() == untaught.save(), f"{seen}, save() is not that of a new policy: it was learned"
            for policy in (taught, untaught):
                after(policy, 1)
            assert list(taught.victims()) == list(untaught.victims()), f"{seen}, the same calls lead to other victims"
            assert taught.save() == untaught.save(), f"{seen}, the same calls teach something else"

    def test_memory_is_bounded(self, tmp_path: Path) -> None:
        """What is held bounds the memory: neither ghosts nor requests for keys that never come make it grow.

        Otherwise the engine's process would grow with every prompt it has seen, until it is killed.
        """
        policy = self.config(tmp_path).open()
        held: dict[ChunkKey, None] = {}
        numbers = itertools.count()
        tracemalloc.start()
        _churn(policy, held, numbers, rounds=4000)
        gc.collect()  # garbage that is not yet collected does not count
        before, _ = tracemalloc.get_traced_memory()
        _churn(policy, held, numbers, rounds=8000)
        gc.collect()
        now, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        # A key that is remembered takes 65 bytes and its entry some more; all of 8000 would be 1 MB.
        assert now - before < 200_000, (
            f"the policy holds at most 33 keys all the time, and takes {now - before} bytes more after 8000 keys came "
            "and went: something is remembered for ever"
        )


def _garbage(saved: bytes) -> list[bytes]:
    """Bytes that were never saved. Where nothing is saved, any bytes are garbage."""
    rng = random.Random(0)
    made = [b"", b"\0", saved[:-1], saved + b"\0", b"\xff" * len(saved), rng.randbytes(len(saved)), rng.randbytes(99)]
    return [each for each in made if each != saved]


def _churn(policy: EvictionPolicy, held: dict[ChunkKey, None], numbers: itertools.count[int], rounds: int) -> None:
    """Keys come and go for good, requests name many that never come, and never more than 33 are held."""
    rng = random.Random(0)
    for now in range(rounds):
        key, stranger = make_key(next(numbers)), make_key(next(numbers))
        policy.request([key, stranger], float(now), {})
        policy.admit(key, NBYTES)
        held[key] = None
        if len(held) > 32:
            chosen = next(policy.victims())
            del held[chosen]
            policy.forget(chosen, evicted=rng.random() < 0.8)
