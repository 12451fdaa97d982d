"""What tiers save is among vLLM's own metrics, and in its log."""

from __future__ import annotations

import prometheus_client
from conftest import cpu_and_disk, prompt

from kvtier_core.engine.scheduler.savings import TierSavings
from kvtier_core.vllm.metrics import KVTierStats


def of_tiers():
    """The values of each metric by tier. They are the process's, and of all its engines."""
    return {
        (sample.name.removeprefix("vllm:kvtier_").removesuffix("_total"), sample.labels["tier"]): sample.value
        for metric in prometheus_client.REGISTRY.collect()
        for sample in metric.samples
        if sample.name.startswith("vllm:kvtier_") and not sample.name.endswith("_created")
    }


def test_what_each_tier_saved_is_counted(engine, tmp_path):
    asked = prompt(140, 1100)
    with engine(cpu_and_disk(tmp_path)) as first:
        first.ask(asked)
    with engine(cpu_and_disk(tmp_path), disable_log_stats=False) as second:
        before = of_tiers()
        second.ask(prompt(141, 1100))  # so that the engine knows its own speed
        assert second.ask(asked)[0].cached == 1088
        told = {key: value - before.get(key, 0) for key, value in of_tiers().items()}
        assert told["loaded_tokens", "disk"] == 1088
        assert told["avoided_seconds", "disk"] > 0
        assert told["waited_seconds", "disk"] > 0
        net = told["avoided_seconds", "disk"] - told["waited_seconds", "disk"]
        assert abs(told["net_seconds_saved", "disk"] - net) < 1e-6
        assert ("loaded_tokens", "cpu") not in told


def test_a_tier_that_is_slower_than_computing_is_declined_and_counted(engine, tmp_path, said):
    asked = prompt(142, 1100)
    with engine(cpu_and_disk(tmp_path, load="auto")) as first:
        first.ask(asked)
    with engine(cpu_and_disk(tmp_path, load="auto"), disable_log_stats=False) as second:
        before = of_tiers()
        second.ask(prompt(143, 1100))
        (disk,) = second.manager._tiers
        disk._reads.speed.rate = 1e3  # bytes a second, as if reads had shown it
        said()
        assert second.ask(asked)[0].cached == 0
        (line,) = [line for line in said() if ": hit " in line]
        assert "hit 0 of 1100 tokens: disk has 17 more chunks: " in line
        told = {key: value - before.get(key, 0) for key, value in of_tiers().items()}
        assert told["declined_tokens", "disk"] == 1088


def test_reports_of_several_steps_are_added():
    first = KVTierStats.of({"disk": TierSavings(64, 0, 0.5, 0.1)})
    second = KVTierStats.of({"disk": TierSavings(32, 16, 0.25, 0.1), "cpu": TierSavings(8)})
    both = first.aggregate(second)
    assert both.data["disk"] == {"loaded": 96, "declined": 16, "avoided": 0.75, "waited": 0.2}
    assert both.reduce()["disk loaded"] == 96
    both.reset()
    assert both.is_empty()
