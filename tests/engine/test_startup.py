"""The start of an engine that is not vLLM's: a stack from its workers' reports, or a reason to do without."""

from __future__ import annotations

import attrs
import pytest
from test_ranks import LAST, REPORT

from kvtier_core.config.load import load_config
from kvtier_core.config.model import IdentityConfig
from kvtier_core.config.registry import Registry
from kvtier_core.config.versions import own_version
from kvtier_core.engine.messages import WorkerReport
from kvtier_core.engine.scheduler.side import SchedulerSide
from kvtier_core.engine.start.startup import Engine, Identity, Refusal
from kvtier_core.types import Namespace

CONFIG = load_config(
    {"version": 1, "chunk_tokens": "auto", "tiers": [{"type": "heap", "capacity": "64MiB"}]}, Registry.of()
)


def identified(chunk_tokens: int, report: WorkerReport) -> Identity:
    before = {"engine": "a host 1.2"}
    return Identity(Namespace.of({**before, "chunk tokens": chunk_tokens, **dict(report.facts)}), Namespace.of(before))


ENGINE = Engine(identified, name="a", model="m", version="a host 1.2", stages=2, loads=False)


@pytest.fixture(autouse=True)
def runtime(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    tmp_path.chmod(0o700)


def test_the_scheduler_side_serves_the_engine_that_its_workers_described(caplog):
    caplog.set_level("INFO", "kvtier")
    side = ENGINE.open(CONFIG, [REPORT, LAST])
    assert isinstance(side, SchedulerSide)
    try:
        assert side.chunk_tokens == 256
        facts = dict(side.namespace.facts)
        assert (facts["engine"], facts["layers"], facts["chunk tokens"]) == ("a host 1.2", "a b | c", "256")
        assert any(f"kvtier: version {own_version()} in a host 1.2; " in line for line in caplog.messages)
    finally:
        side.close()


def test_the_log_says_why_ranks_any_has_no_effect(caplog):
    caplog.set_level("INFO", "kvtier")
    asked = attrs.evolve(CONFIG, identity=IdentityConfig(ranks="any"))
    windows = attrs.evolve(REPORT, own_ranks="group 0 needs sliding window of 64")
    attrs.evolve(ENGINE, stages=1).open(asked, [windows]).close()
    assert "kvtier: ranks: any -> own: group 0 needs sliding window of 64" in caplog.messages
    attrs.evolve(ENGINE, stages=1).open(CONFIG, [windows]).close()
    assert sum("ranks: any" in line for line in caplog.messages) == 1


@pytest.mark.parametrize(
    ("reports", "identify", "reason"),
    [
        ([REPORT, REPORT], lambda *_: Refusal("its weights are unknown"), "its weights are unknown"),
        ([attrs.evolve(REPORT, device="tpu")] * 2, identified, "arena heap has no mover for tpu yet"),
        ([REPORT, WorkerReport("", (), (), "scattered pages")], identified, "scattered pages"),
    ],
)
def test_an_engine_that_cannot_be_served_is_refused_with_the_reason(reports, identify, reason):
    assert attrs.evolve(ENGINE, identify=identify).open(CONFIG, reports) == Refusal(reason)
