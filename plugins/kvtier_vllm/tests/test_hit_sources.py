"""vLLM's own metrics say where a hit came from."""

from __future__ import annotations

import pytest
from real_engines import CHUNK, cpu_and_disk, prompt

from kvtier_core.engine.scheduler.loads import tokens_by_tier
from kvtier_core.interfaces import Medium
from kvtier_vllm.metrics import tokens_by_source


def by_source(served):
    """Tokens that were hits so far. The counters are the process's, and of all its engines."""
    metrics = served.llm.get_metrics()
    named = [metric for metric in metrics if metric.name == "vllm:prompt_tokens_cached_by_source"]
    return {metric.labels["source"]: metric.value for metric in named}


def grown(before, after):
    return {source: after[source] - before[source] for source in after if after[source] != before[source]}


def test_memory_and_disk_are_counted_apart(engine, tmp_path):
    shared = prompt(130, 256)
    short, long = prompt(131, 260, shared), prompt(132, 530, shared)
    with engine(cpu_and_disk(tmp_path)) as first:
        first.ask(long)
    with engine(cpu_and_disk(tmp_path), enable_prefix_caching=True, disable_log_stats=False) as second:
        start = by_source(second)
        second.ask(short)
        from_disk = by_source(second)
        assert grown(start, from_disk) == {"disk": 256}
        second.llm.reset_prefix_cache()
        second.ask(long[:40])  # the engine keeps one block of 32, and loads half a chunk less
        second.ask(long)
        assert grown(from_disk, by_source(second)) == {"device": 32, "host": 256 - 32, "disk": 256}


@pytest.mark.parametrize(
    "first, computed, tokens, counts",
    [
        (0, 0, 256, {"cpu": 128, "disk": 128}),
        (0, 32, 224, {"cpu": 96, "disk": 128}),
        (0, 32, 223, {"cpu": 96, "disk": 127}),
        (2, 160, 200, {"cpu": 96, "disk": 104}),
    ],
)
def test_the_parts_add_up(first, computed, tokens, counts):
    tiers = ["cpu", "cpu", "disk", "disk"]
    assert tokens_by_tier(tiers, first, computed, tokens, CHUNK) == counts
    assert sum(counts.values()) == tokens


def test_a_tier_that_does_not_say_what_it_is_is_external():
    media = {"cpu": Medium.HOST, "heap": Medium.HOST, "disk": Medium.DISK, "s3": Medium.UNSPECIFIED}
    said = tokens_by_source({"cpu": 1, "heap": 2, "disk": 4, "s3": 8}, media)
    assert {source.value: tokens for source, tokens in said.items()} == {
        "host": 3,
        "disk": 4,
        "external_unspecified": 8,
    }
