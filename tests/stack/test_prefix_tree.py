"""The tree in C++ beside the one in Python: every answer is the same, whatever was done before."""

from __future__ import annotations

import random

import pytest

from kvtier_core.stack.index.prefix_tree import PlainPrefixTree, PrefixTree
from kvtier_testing.samples import make_key, make_keys

KEYS = make_keys(40)
A, B, C = KEYS[:3]


@pytest.fixture(params=[PlainPrefixTree, PrefixTree], ids=["plain", "best"])
def tree(request):
    return request.param()


def everything(tree):
    """All that can be asked."""
    held = sorted(tree)
    return (
        held,
        len(tree),
        tree.used,
        [(tree.nbytes(key), tree.place(key)) for key in held],
        tree.places(held),
        [tree.parent(key) for key in KEYS],
        [tree.children(key) for key in KEYS],
        [key in tree for key in KEYS],
        tree.take_freed(),
        tree.missing(KEYS),
        [tree.run(KEYS, start) for start in range(len(KEYS) + 1)],
    )


class Pair:
    """Whatever is done to one is done to the other."""

    def __init__(self, seed):
        self.rng = random.Random(seed)
        self.trees = PlainPrefixTree(), PrefixTree()

    def some(self, most=8):
        return self.rng.sample(KEYS, self.rng.randrange(most))

    def some_places(self, most):
        """Places of some who are held."""
        held = sorted(self.trees[0])
        return {self.trees[0].place(key) for key in self.rng.sample(held, min(len(held), most))}

    def both(self, act):
        answers = [self.outcome(act, tree) for tree in self.trees]
        assert answers[0] == answers[1]
        return answers[0]

    def outcome(self, act, tree):
        try:
            return act(tree)
        except (KeyError, ValueError) as error:
            return type(error)

    def turn(self):
        keys = self.some()
        match self.rng.randrange(7):
            case 0:
                parents = [self.rng.choice([None, *KEYS]) for _ in keys]
                places = [self.rng.randrange(1 << 32) for _ in keys]
                nbytes = self.rng.randrange(1 << 40)
                self.both(lambda tree: tree.add(keys, parents, nbytes, places))
            case 1:
                present = [key for key in keys if key in self.trees[0]]
                self.both(lambda tree: tree.remove(present))
            case 2:
                self.both(lambda tree: tree.adopt(keys))
            case 3:
                self.both(lambda tree: tree.detach(keys))
            case 4:
                key, nbytes = self.rng.choice(KEYS), self.rng.randrange(1 << 40)
                self.both(lambda tree: tree.resize(key, nbytes))
            case 5:
                order = self.rng.sample(sorted(self.trees[0]), len(self.trees[0]))
                spared = set(keys[:4]), dict.fromkeys(keys[4:])
                pinned = self.some_places(3)
                leaf_first = self.rng.random() < 0.8
                amount = self.rng.randrange(1, 50)
                self.both(lambda tree: some_leavers(tree, order, spared, pinned, leaf_first, amount))
            case 6:
                parents = [key for key in keys if key in self.trees[0] and self.trees[0].children(key)]
                self.both(lambda tree: tree.park(parents))
        self.both(everything)


def some_leavers(tree, order, spared, pinned, leaf_first, amount):
    passed: list[bytes] = []
    eviction_candidates = tree.eviction_candidates(iter(order), spared, pinned, leaf_first, passed)
    return [key for key, _ in zip(eviction_candidates, range(amount), strict=False)], passed


@pytest.mark.parametrize("seed", range(20))
def test_both_answer_alike(seed):
    pair = Pair(seed)
    for _ in range(300):
        pair.turn()


def test_many_keys_come_and_go(tree):
    """Entries and their cells are used again, and nobody is lost when the table grows."""
    keys = [make_key(number) for number in range(5000)]
    rng = random.Random(0)
    for _ in range(3):
        tree.add(keys, [None, *keys[:-1]], 1, range(len(keys)))
        assert (len(tree), tree.run(keys), tree.places(keys)) == (5000, 5000, list(range(5000)))
        rng.shuffle(keys)
        for begin in range(0, 5000, 500):
            tree.remove(keys[begin : begin + 500])
            assert tree.missing(keys) == keys[: begin + 500]
    assert (len(tree), tree.used, list(tree)) == (0, 0, [])


def test_a_key_is_held_once(tree):
    tree.add([A], [None], 1, [7])
    for keys in ([B, A], [B, C, B]):
        with pytest.raises(ValueError, match="a key is held already"):
            tree.add(keys, [None] * len(keys), 1, range(len(keys)))
    assert (list(tree), tree.used) == ([A], 1), "all or nothing"


def test_a_key_that_is_not_held_has_no_size(tree):
    for ask in (tree.nbytes, tree.place, lambda key: tree.remove([key]), lambda key: tree.places([key])):
        with pytest.raises(KeyError):
            ask(A)
    assert tree.parent(A) is None


@pytest.mark.parametrize(
    "change",
    [
        lambda tree: tree.remove([A]),
        lambda tree: tree.add([C], [None], 1, [2]),
        lambda tree: tree.adopt([A, B]),
        lambda tree: tree.detach([B]),
    ],
    ids=["remove", "add", "adopt", "detach"],
)
def test_a_changed_tree_ends_the_iteration_of_candidates(tree, change):
    tree.add([A, B], [None, None], 1, [0, 1])
    eviction_candidates = tree.eviction_candidates(iter([A, B]), (), (), True, [])
    assert next(eviction_candidates) == A
    change(tree)
    with pytest.raises(RuntimeError, match="the tree changed"):
        next(eviction_candidates)


def test_a_parked_key_follows_its_last_child_without_being_named(tree):
    tree.add([A, B, C], [None, A, A], 1, [0, 1, 2])
    tree.park([A])
    assert list(tree.eviction_candidates(iter([B, C]), (), (), True, [])) == [B, C, A]
    tree.remove([B])
    assert tree.take_freed() == []
    tree.detach([C])
    assert (tree.take_freed(), tree.take_freed()) == ([A], [])
    assert list(tree.eviction_candidates(iter([C, A]), (), (), True, [])) == [C, A], "it is parked no longer"


def test_a_parent_that_left_with_its_last_child_is_not_reported(tree):
    tree.add([A, B], [None, A], 1, [0, 1])
    tree.park([A])
    tree.remove([A, B])
    assert tree.take_freed() == []


def test_errors_of_containers_propagate(tree):
    class Wrong:
        def __contains__(self, key):
            raise LookupError("not this way")

    tree.add([A], [None], 1, [0])
    for spared, pinned in (([Wrong()], ()), ((), Wrong())):
        with pytest.raises(LookupError, match="not this way"):
            next(tree.eviction_candidates(iter([A]), spared, pinned, True, []))


def test_a_parent_that_is_below_its_child_stays_unknown(tree):
    """Paths that contradict each other leave no circle, in which everybody waits for another to be evicted first."""
    tree.add([A, B, C], [None, A, B], 1, [0, 1, 2])
    tree.adopt([C, A])
    tree.adopt([B, A])
    assert [tree.parent(key) for key in (A, B, C)] == [None, A, B]
    assert list(tree.eviction_candidates(iter([A, B, C]), [], (), True, [])) == [C, B, A]
    tree.remove([B])
    tree.add([B], [C], 1, [1])
    assert [tree.parent(key) for key in (A, B, C)] == [None, None, B]
