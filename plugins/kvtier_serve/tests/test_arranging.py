"""The order of documents with the longest cached prefix, compared with trying every order."""

from __future__ import annotations

import random
from itertools import permutations

import pytest

from kvtier_core.builtin.chained import Chained
from kvtier_core.types import Namespace
from kvtier_serve.operators import arranging
from kvtier_serve.operators.arranging import Search
from kvtier_serve.operators.forms import Documents, Order

CHUNK = 4
KEYS = Chained(Namespace.of({"model": "tiny"}), CHUNK)


def chunks_of(prompts, drawn=None, share=1.0):
    """The chunks of prompts, or a share of them."""
    return {key for prompt in prompts for key in KEYS.keys(prompt) if not drawn or drawn.random() < share}


def run(work):
    """What a generator returns, and how often it yielded."""
    pauses = 0
    while True:
        try:
            next(work)
        except StopIteration as done:
            return done.value, pauses
        pauses += 1


def arranged(asked, cached):
    return run(Search(asked, KEYS, CHUNK, b"", cached.__contains__).arranged())[0]


def prompt_of(asked, order):
    return [*asked.before, *(token for number in order for token in asked.documents[number]), *asked.after]


def cached_tokens(asked, order, cached):
    keys = KEYS.keys(prompt_of(asked, order))
    return CHUNK * next((at for at, key in enumerate(keys) if key not in cached), len(keys))


def drawn_case(seed):
    """Documents, some alike, and the chunks of some orders of some of them, with holes."""
    drawn = random.Random(seed)
    texts = [[drawn.randrange(3) for _ in range(drawn.randrange(12))] for _ in range(drawn.randint(1, 6))]
    asked = Documents([drawn.choice(texts) for _ in texts], drawn.choices(range(3), k=drawn.randrange(6)), [9] * 5)
    orders = [drawn.sample(range(len(texts)), drawn.randint(1, len(texts))) for _ in range(6)]
    return asked, chunks_of([prompt_of(asked, order) for order in orders], drawn, drawn.choice([0.8, 1.0]))


@pytest.mark.parametrize("seed", range(200))
def test_no_other_order_has_a_longer_cached_prefix(seed):
    asked, cached = drawn_case(seed)
    told = arranged(asked, cached)
    every = {order: cached_tokens(asked, order, cached) for order in permutations(range(len(asked.documents)))}
    best = min(every, key=lambda order: (-every[order], order))
    as_requested = tuple(range(len(asked.documents)))
    assert told.best == Order(list(best), every[best]) and told.exhaustive
    assert told.requested == Order(list(as_requested), every[as_requested])
    by_first = {first: max(every[order] for order in every if order[0] == first) for first in as_requested}
    assert {each.documents[0]: each.cached_tokens for each in told.by_first_document} == by_first
    assert all(every[tuple(each.documents)] == each.cached_tokens for each in told.by_first_document)


def test_with_an_empty_cache_the_order_is_that_of_the_request():
    told = arranged(Documents([[1] * 9, [2] * 9, [3] * 9]), set())
    assert told.best == told.requested == Order([0, 1, 2], 0)


def test_a_salt_has_chunks_of_its_own():
    asked = Documents([[1] * 9, [2] * 9])
    cached = set(KEYS.keys(prompt_of(asked, [1, 0]), salt=b"a"))
    assert arranged(asked, cached).best.cached_tokens == 0
    assert run(Search(asked, KEYS, CHUNK, b"a", cached.__contains__).arranged())[0].best == Order([1, 0], 16)


def test_a_search_ends_although_every_order_could_be_extended():
    asked = Documents([[number] for number in range(30)])
    told, pauses = run(Search(asked, KEYS, CHUNK, b"", lambda key: True).arranged())
    assert told.best == Order(list(range(30)), 28) and not told.exhaustive
    assert pauses > 100


def long_case():
    """Twenty documents of a thousand tokens, and the chunks of the reversed order."""
    drawn = random.Random(0)
    asked = Documents([[drawn.randrange(50_000) for _ in range(1000)] for _ in range(20)])
    order = list(reversed(range(20)))
    return asked, order, chunks_of([prompt_of(asked, order)])


def test_a_search_that_ends_early_has_the_longest_prefix_that_it_found(monkeypatch):
    asked, order, cached = long_case()
    found = set()
    monkeypatch.setattr(arranging, "_MOST", -4000)
    search = Search(asked, KEYS, CHUNK, b"", lambda key: key in cached and not found.add(key))
    told, _ = run(search.arranged())
    assert not told.exhaustive and told.best.documents[0] == order[0]
    assert 0 < told.best.cached_tokens == CHUNK * len(found) < 20_000


def test_orders_are_not_extended_beyond_a_missing_chunk():
    asked, order, cached = long_case()
    looked_up = []
    search = Search(asked, KEYS, CHUNK, b"", lambda key: looked_up.append(key) or key in cached)
    assert run(search.arranged())[0].best == Order(order, 20_000)
    assert len(looked_up) <= len(cached) + 20 * 21 // 2 + 1
