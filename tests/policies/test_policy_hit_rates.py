"""How much of a real trace each policy gives back: the figures of one run, so that a change of mind is seen.

Replayed as a tier would see it: a request is looked up from its root, only the leading run of held chunks counts, then
its absent chunks are offered, root first, and nothing of its own path leaves for them.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from plain_policies import PLAIN_GITTINS, PLAIN_LRU, PLAIN_SIMPLE_GITTINS

from kvtier_core.policies.gittins import GittinsConfig
from kvtier_core.policies.lru import LruConfig
from kvtier_core.stack.index.cache_index import CacheIndex
from kvtier_policies.arc import ArcConfig
from kvtier_policies.fifo import FifoConfig
from kvtier_policies.lfu import LfuConfig
from kvtier_policies.lru2 import Lru2Config
from kvtier_policies.mru import MruConfig
from kvtier_policies.s3fifo import S3FifoConfig
from kvtier_policies.tournament import TournamentConfig

TOKENS = 512
TRACE = Path(__file__).parent / "traces" / "conversation.jsonl"


def read_trace():
    """For each request the time, the tokens, and the keys of its chunks."""
    requests = [json.loads(line) for line in TRACE.read_text().splitlines()]
    return [
        (each["timestamp"] / 1000, each["input_length"], [number.to_bytes(32) for number in each["hash_ids"]])
        for each in requests
    ]


@pytest.fixture(scope="module")
def trace():
    return read_trace()


def hit_rate(config, trace, slots):
    """The tokens that were given back, of all tokens."""
    index = CacheIndex(config.open())
    given = asked = 0
    for now, tokens, path in trace:
        run = index.resident.run(path)
        given += min(run * TOKENS, tokens)
        asked += tokens
        index.request(path, now, {})
        parents = dict(zip(path, [None, *path], strict=False))
        absent = index.resident.missing(path)
        welcome, victims = index.plan_admission(absent, 1, slots - len(index), lambda key: 1, [parents])
        index.remove(victims, evicted=True)
        index.admit(welcome, [parents[key] for key in welcome], 1)
        assert len(index) <= slots
    return given / asked


#: At 5 and 20 in a hundred of the distinct chunks; this file prints them when it is run.
SLOTS = (777, 3107)
GOLDEN = [
    (ArcConfig(), [0.0374, 0.0663]),
    (FifoConfig(), [0.0374, 0.0629]),
    (GittinsConfig(classes="full"), [0.0473, 0.0848]),
    (GittinsConfig(classes="simple"), [0.0542, 0.0911]),
    (LfuConfig(), [0.0374, 0.0658]),
    (Lru2Config(), [0.045, 0.0803]),
    (LruConfig(), [0.0374, 0.0638]),
    (MruConfig(), [0.0451, 0.0997]),
    (S3FifoConfig(), [0.0399, 0.0741]),
    (TournamentConfig(), [0.0465, 0.0625]),
]


@pytest.mark.parametrize(("config", "rates"), GOLDEN)
def test_hit_rates_are_those_of_the_run_that_was_looked_at(trace, config, rates):
    assert [round(hit_rate(config, trace, slots), 4) for slots in SLOTS] == rates


@pytest.mark.parametrize(
    ("plain", "config"),
    [
        (PLAIN_LRU, LruConfig()),
        (PLAIN_GITTINS, GittinsConfig()),
        (PLAIN_SIMPLE_GITTINS, GittinsConfig(classes="simple")),
    ],
)
def test_hit_rates_are_the_same_where_nothing_could_be_compiled(trace, plain, config):
    test_hit_rates_are_those_of_the_run_that_was_looked_at(trace, plain, dict(GOLDEN)[config])


if __name__ == "__main__":
    for each, _ in GOLDEN:
        print(f"    ({each!r}, {[round(hit_rate(each, read_trace(), slots), 4) for slots in SLOTS]}),")
