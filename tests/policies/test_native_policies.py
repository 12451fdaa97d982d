"""The policies in C++ against those in Python: the same calls to both, and every answer is the same."""

from __future__ import annotations

import functools
import itertools
import random
import struct
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier_core.interfaces import EvictionPolicy
from kvtier_core.native import extension
from kvtier_core.policies.gittins import Gittins, GittinsConfig
from kvtier_core.policies.lru import Lru, LruConfig
from kvtier_testing.samples import make_key, make_keys

pytestmark = pytest.mark.skipif(extension is None, reason="nothing was compiled here: there is one of each, in Python")

KINDS = {
    "lru": (Lru, "Lru", {}),
    "gittins": (Gittins, "Gittins", {"sizes": 10}),
    "simple gittins": (Gittins, "Gittins", {"sizes": 1}),
}
every_kind = pytest.mark.parametrize("kind", KINDS)
KEYS = make_keys(90)
#: Seconds from one request to the next: less than the first step of age, and more than the last.
PAUSES = (0.0, 0.001, 0.2, 0.5, 3.0, 61.0, 3600.0, 86400.0, 1e6)
HINTS = (
    {},
    {"session": "ends"},
    {"session": "goes on", "turn": "ends"},
    *({"pause": text} for text in ("63", "64", "0256", "4096", "999999999")),
    *({"pause": text} for text in ("", "-64", "64 s", "1e3", "1234567890", "\u0661\u0662\u0663", "64\0", "\udce9")),
    {"session": "ends", "pause": "64"},
)


def compiled(kind: str) -> EvictionPolicy:
    _, name, arguments = KINDS[kind]
    return getattr(extension, name)(**arguments)


def plain(kind: str) -> EvictionPolicy:
    policy, _, arguments = KINDS[kind]
    return policy(**arguments)


class Both:
    """One that asks both and believes neither alone."""

    def __init__(self, kind: str):
        self.plain, self.compiled = plain(kind), compiled(kind)
        self.held: dict[bytes, None] = {}
        self.now = 0.0

    def __getattr__(self, verb):
        return functools.partial(self._ask, verb)

    def _ask(self, verb, *arguments, **more):
        expected, answer = (_outcome(getattr(each, verb), arguments, more) for each in (self.plain, self.compiled))
        assert answer == expected, f"{verb}{arguments}"
        return answer

    def request(self, path, pause, hints=None):
        self.now += pause
        self._ask("request", path, self.now, hints or {})

    def admit(self, key):
        self._ask("admit", key, 4096)
        self.held[key] = None

    def forget(self, key, *, evicted):
        self._ask("forget", key, evicted=evicted)
        self.held.pop(key, None)

    def victims(self):
        """All of them."""
        expected = list(self.plain.victims())
        assert list(self.compiled.victims()) == expected
        assert sorted(expected) == sorted(self.held)
        return expected

    def first_victims(self, count):
        expected, answer = (list(itertools.islice(each.victims(), count)) for each in (self.plain, self.compiled))
        assert answer == expected
        return answer


def _outcome(verb, arguments, more):
    try:
        return verb(*arguments, **more)
    except KeyError as error:
        return repr(error)


WHICH = st.integers(0, len(KEYS) - 1)
STEPS = st.lists(
    st.one_of(
        st.tuples(
            st.just("request"),
            st.lists(WHICH, min_size=1, max_size=40),
            st.sampled_from(PAUSES),
            st.sampled_from(HINTS),
        ),
        st.tuples(st.just("store"), st.integers(0, 80), st.integers(1, 10), st.sampled_from(PAUSES)),
        st.tuples(st.just("admit"), WHICH),
        st.tuples(st.just("forget"), WHICH, st.booleans()),
        st.tuples(st.just("evict"), st.integers(1, 12)),
        st.tuples(st.just("prefers"), WHICH, WHICH),
    ),
    max_size=40,
)


def step(both: Both, move: str, *what) -> None:
    """Anything, by callers who are right and by those who are wrong."""
    match move, what:
        case "request", (which, pause, hints):
            both.request([KEYS[i] for i in which], pause, hints)
        case "store", (first, count, pause):
            both.request(KEYS[first : first + count], pause)
            for key in reversed(KEYS[first : first + count]):
                if key not in both.held:
                    both.admit(key)
        case "admit", (which,):
            both.admit(KEYS[which])
        case "forget", (which, evicted):
            both.forget(KEYS[which], evicted=evicted)
        case "evict", (count,):
            for key in both.first_victims(count):
                both.forget(key, evicted=True)
        case "prefers", (newcomer, victim):
            both.prefers(KEYS[newcomer], KEYS[victim])


@every_kind
@settings(deadline=None)
@given(steps=STEPS)
def test_native_and_python_give_the_same_answers(kind, steps):
    both = Both(kind)
    for each in steps:
        step(both, *each)
        both.victims()
    both.save()


class Traffic:
    """Requests that share prefixes, many that come once, and a tier that holds ``room`` chunks of them."""

    def __init__(self, both: Both, seed: int, room: int):
        self.both, self.room = both, room
        self.rng = random.Random(seed)
        self.numbers = itertools.count()
        self.paths: list[list[bytes]] = []
        self.answers: set[bool] = set()

    def turn(self) -> None:
        rng = self.rng
        if self.paths and rng.random() < 0.5:
            begun = rng.choice(self.paths[-self.room // 20 :])
            path = [*begun[: rng.randint(0, 30)], *self._strangers(rng.randint(1, 3))]
            self.paths = [*self.paths[-200:], path]
        else:
            path = self._strangers(rng.randint(1, 12))
            if rng.random() < 0.1:
                self.paths.append(path)
        self.both.request(path, rng.choice(PAUSES if rng.random() < 0.02 else PAUSES[:4]), rng.choice(HINTS))
        for key in reversed(path):
            if key not in self.both.held:
                self._store(key)
        if rng.random() < 0.05 and self.both.held:
            self.both.forget(rng.choice(list(self.both.held)), evicted=False)
        for victim in self.both.first_victims(1):
            self.answers.add(self.both.prefers(rng.choice(rng.choice(self.paths or [path])), victim))

    def _strangers(self, count: int) -> list[bytes]:
        return [make_key(next(self.numbers)) for _ in range(count)]

    def _store(self, key: bytes) -> None:
        if len(self.both.held) == self.room:
            (victim,) = self.both.first_victims(1)
            if not self.both.prefers(key, victim):
                return
            self.both.forget(victim, evicted=self.rng.random() < 0.9)
        self.both.admit(key)


@every_kind
@pytest.mark.parametrize(("room", "turns"), [(10, 1000), (700, 3000)])
def test_a_long_life_is_lived_alike(kind, room, turns):
    """Thousands of chunks come and go, most of them twice or more; then what was learned is another's start."""
    learned = b""
    for life in range(2):
        both = Both(kind)
        both.restore(learned)
        traffic = Traffic(both, seed=life, room=room)
        for turn in range(turns // (life + 1)):
            traffic.turn()
            if turn % 50 == 0:
                both.victims()
                both.save()
        learned = both.save()
        both.victims()
        if kind != "lru":
            assert traffic.answers == {True, False}
            assert next(traffic.numbers) > 1.5 * len(both.plain._group), "hardly a ghost had to go"


@every_kind
def test_garbage_teaches_neither(kind):
    both = Both(kind)
    saved, rng = both.save(), random.Random(0)
    for garbage in (b"", b"\0", saved[:-1], saved + b"\0", b"\xff" * len(saved), rng.randbytes(len(saved))):
        both.restore(garbage)
        assert both.save() == saved


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("kind", ["gittins", "simple gittins"])
def test_native_and_python_restore_saved_states_alike(kind, seed):
    """Also what no life teaches: odds that are as good as one, and ages that cannot be told apart any more."""
    both, rng = Both(kind), random.Random(seed)
    saved = both.save()
    count = (len(saved) - 16) // 8
    lives = [rng.choice((1.0, 30.0, 1e6)) if rng.random() < 2.0**-seed else 0.0 for _ in range(count)]
    returns = [seen * rng.choice((0.0, 0.5, 1.0, 1.0009)) for seen in lives]
    both.restore(saved[:16] + struct.pack(f"<{2 * count}f", *returns, *lives))
    assert both.save() != saved or not any(lives)
    for number in range(40):
        step(both, "store", rng.randint(0, 80), rng.randint(1, 10), PAUSES[number // 5])
        both.victims()


def collides_with(key: bytes, begins: bytes) -> bytes:
    """Another key of the same hash (csrc/table.h): each step of it can be walked back."""
    mixer, mask = 0x9E3779B97F4A7C15, (1 << 64) - 1

    def rotated(word, bits):
        return (word << bits | word >> (64 - bits)) & mask

    def mixed(words):
        return functools.reduce(lambda hash, word: rotated(hash ^ word, 23) * mixer & mask, words, 0)

    words, others = (
        [int.from_bytes(each[i : i + 8], sys.byteorder) for i in range(0, 32, 8)] for each in (key, begins)
    )
    last = rotated(mixed(words) * pow(mixer, -1, 1 << 64) & mask, 64 - 23) ^ mixed(others[:3])
    twin = begins[:24] + last.to_bytes(8, sys.byteorder)
    assert mixed([*others[:3], last]) == mixed(words) and twin != key
    return twin


def test_keys_of_one_hash_are_distinguished_while_they_are_held():
    """A ghost of one may be taken for that of the other: then somebody leaves early or late, and nothing is lost."""
    first, *others = make_keys(30)
    keys = [first, *(collides_with(first, each) for each in others)]
    lru = Both("lru")
    for key in keys:
        lru.admit(key)
    lru.request(keys[10:20], 1.0)
    assert lru.victims() == [*keys[:10], *keys[20:], *reversed(keys[10:20])]
    gittins, rng, held = compiled("gittins"), random.Random(0), set()
    for now in range(2000):
        gittins.request(rng.sample(keys, 3), float(now), {})
        key = rng.choice(keys)
        if key in held:
            gittins.forget(key, evicted=rng.random() < 0.8)
        else:
            gittins.admit(key, 4096)
        held ^= {key}
        assert sorted(gittins.victims()) == sorted(held)


@every_kind
def test_a_change_during_victims_raises(kind):
    changes = [
        lambda policy: policy.request(KEYS[:2], 2.0, {}),
        lambda policy: policy.admit(KEYS[9], 4096),
        lambda policy: policy.forget(KEYS[1], evicted=True),
        lambda policy: policy.forget(KEYS[1], evicted=False),
    ]
    for change, told in itertools.product(changes, (0, 1)):
        policy = compiled(kind)
        for key in KEYS[:3]:
            policy.admit(key, 4096)
        victims = policy.victims()
        for _ in range(told):
            next(victims)
        change(policy)
        for _ in range(2):
            with pytest.raises(RuntimeError, match="changed"):
                next(victims)
        assert len(list(policy.victims())) in (2, 3, 4)


@every_kind
def test_victims_are_told_after_their_policy_was_dropped(kind):
    """Whoever holds the iterator holds the policy."""
    policy = compiled(kind)
    for key in KEYS[:3]:
        policy.admit(key, 4096)
    victims = policy.victims()
    del policy
    assert sorted(victims) == sorted(KEYS[:3])
    with pytest.raises(StopIteration):
        next(victims)


@every_kind
def test_an_invalid_key_changes_nothing(kind):
    policy = compiled(kind)
    policy.admit(KEYS[0], 4096)
    before = list(policy.victims()), policy.save()
    for wrong in ("text", b"short", 7, None):
        for call in (
            lambda wrong=wrong: policy.request([KEYS[0], wrong], 1.0, {}),
            lambda wrong=wrong: policy.admit(wrong, 4096),
            lambda wrong=wrong: policy.forget(wrong, evicted=True),
        ):
            with pytest.raises((ValueError, TypeError)):
                call()
    assert (list(policy.victims()), policy.save()) == before


@every_kind
def test_a_wrong_call_is_a_key_error_that_names_the_key(kind):
    policy = compiled(kind)
    with pytest.raises(KeyError) as caught:
        policy.forget(KEYS[0], evicted=False)
    assert caught.value.args == (KEYS[0],)


@every_kind
def test_memory_of_a_policy_is_bounded_by_its_resident_keys(kind):
    """Three times as many come and go, and it does not grow."""

    def churn(first, rounds, room=2000):
        for number in range(first, first + rounds):
            policy.request([make_key(number)], number * 0.01, {})
            policy.admit(make_key(number), 4096)
            if number >= room:
                policy.forget(next(policy.victims()), evicted=True)

    policy = compiled(kind)
    churn(0, 12_000)
    before = sys.getsizeof(policy)
    churn(12_000, 24_000)
    assert before > 2000 * 32
    assert sys.getsizeof(policy) <= 1.1 * before


@pytest.mark.parametrize(("config", "name"), [(LruConfig(), "Lru"), (GittinsConfig(), "Gittins")])
def test_a_config_opens_the_native_policy(config, name):
    policy = config.open()
    assert type(policy) is getattr(extension, name)
    assert isinstance(policy, EvictionPolicy)
    assert policy.leaf_first is EvictionPolicy.leaf_first
