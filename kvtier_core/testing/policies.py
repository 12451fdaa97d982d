"""The laws of an eviction policy. Subclass `PolicyLaws` and name a config."""

from __future__ import annotations

import itertools
import random
import tracemalloc
from collections.abc import Sequence
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier_core.interfaces import EvictionConfig, EvictionPolicy
from kvtier_core.testing.laws import Laws
from kvtier_core.testing.samples import make_key, make_keys
from kvtier_core.types import ChunkKey

_KEYS = make_keys(12)
_NBYTES = 4096
#: What a policy may ask a tier to keep for it.
_SAVED_NBYTES = 1 << 16
_WHICH = st.integers(0, len(_KEYS) - 1)
_HISTORIES = st.lists(
    st.one_of(
        st.tuples(st.just("request"), st.lists(_WHICH, min_size=1, max_size=6, unique=True)),
        st.tuples(st.just("admit"), _WHICH),
        st.tuples(st.just("forget"), _WHICH),
        st.tuples(st.just("evict"), st.integers(1, 4)),
    ),
    max_size=60,
)
Step = tuple[str, int | Sequence[int]]
_EXAMPLES = settings(max_examples=150, deadline=None, database=None)


class PolicyLaws(Laws):
    """Subclass, and implement `config`."""

    def config(self, folder: Path) -> EvictionConfig:
        return super().config(folder)

    def test_victims_are_the_held_keys_each_once(self, tmp_path: Path):
        @_EXAMPLES
        @given(_HISTORIES)
        def holds(history):
            policy, held = self.config(tmp_path).open(), set()
            for now, step in enumerate(history):
                live(policy, held, step, now)
                victims = list(policy.victims())
                assert len(victims) == len(set(victims)), "a key is a victim twice"
                assert set(victims) == held, "victims() names other keys than those it was told of"

        holds()

    def test_victims_forgets_none(self, tmp_path: Path):
        """Asking is no deed: the same question has the same answer."""

        @_EXAMPLES
        @given(_HISTORIES)
        def holds(history):
            policy, held = self.config(tmp_path).open(), set()
            for now, step in enumerate(history):
                live(policy, held, step, now)
            assert list(policy.victims()) == list(policy.victims())

        holds()

    def test_the_same_history_has_the_same_victims(self, tmp_path: Path):
        """No clock, no entropy, no order of a set."""
        for seed in range(50):
            first, second = ([*self._after(_history(seed), tmp_path).victims()] for _ in range(2))
            assert first == second

    def test_victims_may_be_left_halfway(self, tmp_path: Path):
        """A tier takes a few, drops the iterator, and changes what is held."""
        policy, held = self.config(tmp_path).open(), set()
        for key in _KEYS:
            policy.admit(key, _NBYTES)
            held.add(key)
        for now in range(len(held)):
            chosen = next(policy.victims())
            policy.forget(chosen, evicted=bool(now % 2))
            held.discard(chosen)
            policy.request(_KEYS[now % 4 :: 3], float(now), {})
            assert set(policy.victims()) == held

    def test_preferring_is_no_deed(self, tmp_path: Path):
        """The same question has the same answer, and the same victims follow."""
        for seed in range(50):
            asked, other = (self._after(_history(seed), tmp_path) for _ in range(2))
            victims = list(asked.victims())
            answers = [[asked.prefers(key, victim) for key in _KEYS for victim in reversed(victims)] for _ in range(2)]
            assert answers[0] == answers[1]
            assert list(asked.victims()) == victims == list(other.victims())
            for policy in (asked, other):
                policy.request(_KEYS[:5], 1000.0, {})
            assert list(asked.victims()) == list(other.victims())

    def test_what_is_saved_is_small_and_changes_no_promise(self, tmp_path: Path):
        """What another has learned is taken in; garbage teaches nothing, and raises nothing."""
        saved = self._after(_history(0), tmp_path).save()
        assert isinstance(saved, bytes)
        assert len(saved) <= _SAVED_NBYTES
        others = [self.config(tmp_path).open(), *(self._after(_history(seed), tmp_path) for seed in range(1, 9))]
        assert all(len(other.save()) == len(saved) for other in others), "its length depends on what was learned"
        rng = random.Random(0)
        garbage = [b"", b"\0", saved[:-1], saved + b"\0", b"\xff" * len(saved), rng.randbytes(len(saved))]
        for memory in (saved, *garbage):
            policy, held = self.config(tmp_path).open(), set()
            policy.restore(memory)
            for now, step in enumerate(_history(1)):
                live(policy, held, step, now)
                assert sorted(policy.victims()) == sorted(held)
        for memory in garbage:
            taught, untaught = self.config(tmp_path).open(), self.config(tmp_path).open()
            taught.restore(memory)
            assert taught.save() == untaught.save(), "garbage was learned"

    def test_memory_is_bounded(self, tmp_path: Path):
        """By what is held: ghosts and requests for strangers leave nothing that grows."""
        policy = self.config(tmp_path).open()
        held: dict[ChunkKey, None] = {}
        numbers = itertools.count()
        tracemalloc.start()
        _churn(policy, held, numbers, rounds=4000)
        before, _ = tracemalloc.get_traced_memory()
        _churn(policy, held, numbers, rounds=8000)
        after, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        # A key that is remembered takes 65 bytes and its entry some more; all of 8000 would be 1 MB.
        assert after - before < 200_000, f"{after - before} bytes more after 8000 keys came and went"

    def _after(self, history: Sequence[Step], folder: Path) -> EvictionPolicy:
        policy, held = self.config(folder).open(), set()
        for now, step in enumerate(history):
            live(policy, held, step, now)
        return policy


def live(policy: EvictionPolicy, held: set[ChunkKey], step: Step, now: float) -> None:
    """One step of a history, as a tier would take it: no key is admitted twice, no stranger is forgotten."""
    match step:
        case "request", which:
            policy.request([_KEYS[i] for i in which], float(now), {})
        case "admit", which if _KEYS[which] not in held:
            policy.admit(_KEYS[which], _NBYTES)
            held.add(_KEYS[which])
        case "forget", which if _KEYS[which] in held:
            held.remove(_KEYS[which])
            policy.forget(_KEYS[which], evicted=False)
        case "evict", count:
            for key in list(itertools.islice(policy.victims(), count)):
                held.remove(key)
                policy.forget(key, evicted=True)


def _history(seed: int) -> list[Step]:
    """Chosen by a seed, for what is not deterministic cannot be shrunk."""
    rng = random.Random(seed)
    return [
        rng.choice(
            (
                ("request", rng.sample(range(len(_KEYS)), rng.randint(1, 6))),
                ("admit", rng.randrange(len(_KEYS))),
                ("admit", rng.randrange(len(_KEYS))),
                ("forget", rng.randrange(len(_KEYS))),
                ("evict", rng.randint(1, 4)),
            )
        )
        for _ in range(60)
    ]


def _churn(policy: EvictionPolicy, held: dict[ChunkKey, None], numbers: itertools.count, rounds: int) -> None:
    """Keys come and go for good, requests name many that never come, and never more than 32 are held."""
    rng = random.Random(0)
    for now in range(rounds):
        key, stranger = make_key(next(numbers)), make_key(next(numbers))
        policy.request([key, stranger], float(now), {})
        policy.admit(key, _NBYTES)
        held[key] = None
        if len(held) > 32:
            chosen = next(policy.victims())
            del held[chosen]
            policy.forget(chosen, evicted=rng.random() < 0.8)
