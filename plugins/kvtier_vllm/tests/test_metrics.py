"""What is counted is among vLLM's own metrics, and in its log."""

from __future__ import annotations

import prometheus_client
from patience import HANG
from real_engines import cpu_and_disk, prompt

from kvtier_core.engine.scheduler.prefill_speed import PrefillSpeed
from kvtier_core.telemetry.metrics import METRICS
from kvtier_core.telemetry.readings import Reading
from kvtier_core.types import Nbytes
from kvtier_vllm.metrics import KVTierStats


def shown():
    """The value of each sample, by its name and the labels of the table in their order."""
    labels = {metric.name: metric.labels for metric in METRICS}
    return {
        (sample.name.removesuffix("_total"), *(sample.labels[name] for name in labels[metric.name])): sample.value
        for metric in prometheus_client.REGISTRY.collect()
        if metric.name in labels
        for sample in metric.samples
        if not sample.name.endswith(("_created", "_bucket"))
    }


def of_vllm(name):
    """The value of one of vLLM's own counters."""
    samples = (sample for metric in prometheus_client.REGISTRY.collect() for sample in metric.samples)
    return sum(sample.value for sample in samples if sample.name == name)


def parts(told, tier):
    """Tokens of a tier: queried, hit, missed, bypassed."""
    bypassed = sum(value for key, value in told.items() if key[:2] == ("kvtier_bypass_tokens", tier))
    names = ("kvtier_query_tokens", "kvtier_hit_tokens", "kvtier_miss_tokens")
    return *(told.get((name, tier), 0) for name in names), bypassed


def test_everything_is_counted_and_adds_up(engine, tmp_path):
    asked = prompt(140, 1100)
    with engine(cpu_and_disk(tmp_path)) as first:
        first.ask(asked)
    with engine(cpu_and_disk(tmp_path), disable_log_stats=False) as second:
        second.ask(prompt(141, 1100))  # so that the engine knows its own speed
        assert second.ask(asked)[0].cached == 1088
        assert second.ask(asked)[0].cached == 1088
        second.settle()
        second.ask(prompt(141, 40))
        told = shown()
        assert parts(told, "cpu") == (3 * 1100 + 40, 1088, 2 * 1100 + 12 + 40, 0)
        assert parts(told, "disk") == (2 * 1100 + 12 + 40, 1088, 1100 + 12 + 12 + 40, 0)
        assert of_vllm("vllm:external_prefix_cache_queries_total") == 3 * 1100 + 40
        assert of_vllm("vllm:external_prefix_cache_hits_total") == 2 * 1088
        for usage in second.manager.usage():
            assert told["kvtier_held_chunks", usage.tier] == usage.chunks == 34
            assert told["kvtier_held_bytes", usage.tier] == usage.nbytes
            assert told["kvtier_capacity_bytes", usage.tier] == usage.capacity
            assert told["kvtier_inflight_bytes", usage.tier] == told["kvtier_pinned_slots", usage.tier] == 0
        assert told["kvtier_chunks", "cpu", "stored"] == told["kvtier_chunks", "disk", "written"] == 17
        assert told["kvtier_chunks", "disk", "read"] == told["kvtier_chunks", "cpu", "promoted"] == 17
        for tier, operation in (("cpu", "load"), ("disk", "read"), ("disk", "write")):
            assert told["kvtier_operation_seconds_count", tier, operation] >= 1
            assert 0 < told["kvtier_operation_seconds_sum", tier, operation] < HANG
            assert told["kvtier_moved_bytes", tier, operation] > 0
        assert told["kvtier_moved_bytes", "cpu", "store"] > 0
        assert ("kvtier_operation_seconds_count", "cpu", "store") not in told, "that would be the time of a step"
        assert told["kvtier_chunks", "cpu", "loaded"] == 2 * 17
        assert told["kvtier_breaker_open", "disk", "read"] == 0
        for tier in ("cpu", "disk"):
            assert told["kvtier_avoided_seconds", tier] > 0
            net = told["kvtier_avoided_seconds", tier] - told["kvtier_waited_seconds", tier]
            assert abs(told["kvtier_net_seconds_saved", tier] - net) < 1e-6


def test_a_tier_that_is_slower_than_computing_is_declined_and_counted(engine, tmp_path):
    asked = prompt(142, 1100)
    with engine(cpu_and_disk(tmp_path, load="auto")) as first:
        first.ask(asked)
    with engine(cpu_and_disk(tmp_path, load="auto"), disable_log_stats=False) as second:
        second.ask(prompt(143, 1100))
        (disk,) = second.manager.tiers
        disk._reads._speed.rate = 1e3  # bytes a second, as if reads had shown it
        second.outcomes()
        assert second.ask(asked)[0].cached == 0
        (outcome,) = second.outcomes()
        assert (outcome.loaded, outcome.tokens) == (0, 1100) and outcome.why.startswith("disk has 17 more chunks: ")
        told = shown()
        assert told["kvtier_bypass_tokens", "disk", "sooner computed than loaded"] == 1088
        assert parts(told, "disk") == (2200, 0, 1112, 1088)


def test_decoded_tokens_are_not_prompt_tokens(engine, tmp_path, monkeypatch):
    planned, plan = [], PrefillSpeed.planned

    def note(speed, step, now):
        planned.append((step.prompt, step.decoded))
        plan(speed, step, now)

    monkeypatch.setattr(PrefillSpeed, "planned", note)
    with engine(cpu_and_disk(tmp_path)) as served:
        served.ask(prompt(144, 1100), tokens=8)
        served.ask(prompt(144, 1100), tokens=8)  # a hit of 1088
    assert [sum(counts) for counts in zip(*planned, strict=True)] == [1100 + 12, 2 * 7]


def report(*readings):
    stats = KVTierStats()
    stats.add(readings)
    return stats.take()


def test_reports_of_several_steps_are_added():
    first = report(
        Reading("kvtier_hit_tokens", ("disk",), 64),
        Reading("kvtier_held_bytes", ("disk",), 10),
        Reading("kvtier_operation_seconds", ("disk", "read"), 0.5),
    )
    second = report(
        Reading("kvtier_hit_tokens", ("disk",), 32),
        Reading("kvtier_hit_tokens", ("cpu",), 8),
        Reading("kvtier_held_bytes", ("disk",), 20),
        Reading("kvtier_operation_seconds", ("disk", "read"), 0.25),
    )
    both = first.aggregate(second)
    assert both.data == {
        "kvtier_hit_tokens": {"disk": 96, "cpu": 8},
        "kvtier_held_bytes": {"disk": 20},
        "kvtier_operation_seconds": {"disk|read": [0.5, 0.25]},
    }
    assert first.data["kvtier_operation_seconds"] == {"disk|read": [0.5]}, "it is another report's"
    assert both.reduce() == {"cpu hit_tokens": 8, "disk hit_tokens": 96}
    both.reset()
    assert both.is_empty()


def test_each_figure_is_reported_once():
    stats = KVTierStats()
    stats.add([Reading("kvtier_hit_tokens", ("disk",), 64)])
    assert [stats.take().data, stats.take()] == [{"kvtier_hit_tokens": {"disk": 64}}, None]


def test_a_report_can_be_sent_to_another_process():
    """vLLM's encoder knows no subclass of a number: its thread would end, and with it every answer of the engine."""
    from vllm.v1.serial_utils import MsgpackEncoder

    MsgpackEncoder().encode(report(Reading("kvtier_capacity_bytes", ("cpu",), Nbytes(1 << 30))).data)
