"""The metrics of a server, as Prometheus reads them."""

from __future__ import annotations

import gc
import json
import os
import re
import signal
import weakref
from collections import Counter

import httpx
import pytest
from patience import HANG, wait_until
from prometheus_client.parser import text_string_to_metric_families
from served import FRAME, serving
from source_copy import ROOT
from test_operators import SECRET
from test_shared_stack import store

from kvtier_core.config.model import ProgramConfig
from kvtier_core.stack.outcomes import Terms
from kvtier_core.telemetry.metrics import METRICS
from kvtier_serve.operators.access import TOKEN
from kvtier_serve.operators.http import HTTP
from kvtier_serve.operators.metrics import OF_A_SERVER
from kvtier_serve.tenants import ANONYMOUS, Quota, Tenants
from kvtier_testing.samples import make_keys

DASHBOARD = json.loads((ROOT / "examples/grafana-server.json").read_text())
OURS = b'{"cache_salt": "ours"}'


@pytest.fixture
def served(tmp_path, monkeypatch):
    monkeypatch.setenv(TOKEN, SECRET)
    disk = {"type": "disk", "path": str(tmp_path / "disk"), "capacity": "8MiB", "min_free": "0B", "shared": True}
    with serving(tmp_path, 64, disk, quota=Quota(hard=32 * FRAME)) as served:
        served.server.programs.begin([ProgramConfig("sleeps", ("sleep", "1000"))], {})
        http = HTTP(served.server)
        served.url = f"http://127.0.0.1:{http.open_port('127.0.0.1', 0)}/metrics"
        yield served
        http.close()


def answer(served):
    return httpx.get(served.url, trust_env=False, timeout=HANG, headers={"Authorization": f"Bearer {SECRET}"})


def families(served):
    return {family.name: family for family in text_string_to_metric_families(answer(served).text)}


def values(served, name, *labels):
    """The samples of this name: the values by these labels, summed over others."""
    found = Counter()
    for family in families(served).values():
        for sample in family.samples:
            if sample.name == name:
                found[tuple(sample.labels[label] for label in labels)] += sample.value
    return dict(found)


def used_by_two_models(served):
    first, second = served.stack("first"), served.stack("second")
    store(first, make_keys(3))
    for _ in range(2):  # only who comes back is a tenant
        second.on_request(make_keys(5), salt=OURS)
    second.reserve(make_keys(5), "store", OURS)
    second.commit("store")
    for stack in (first, second):
        stack.drain(HANG)
    first.lookup([*make_keys(3), *make_keys(9)[-1:]], "request")
    second.lookup(make_keys(5), "request", Terms(salt=OURS))
    for stack in (first, second):
        stack.release("request")
        stack.drain(HANG)
    return first, second


def test_prometheus_reads_each_family_once(served):
    used_by_two_models(served)
    told = answer(served)
    assert told.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    heads = re.findall(r"^# (HELP|TYPE) (\w+)", told.text, re.MULTILINE)
    assert max(Counter(heads).values()) == 1
    names = [family.name for family in text_string_to_metric_families(told.text)]
    assert {metric.name for metric in OF_A_SERVER} < set(names) < {metric.name for metric in (*METRICS, *OF_A_SERVER)}
    samples = [line.rpartition(" ")[0] for line in told.text.splitlines() if line[0] != "#"]
    assert max(Counter(samples).values()) == 1, "a series is told once"


def test_models_namespaces_and_tenants_are_told_apart(served):
    used_by_two_models(served)
    tenant = served.server.spaces.tenants.name(OURS)
    none, ours = ("first", ANONYMOUS), ("second", tenant)
    assert values(served, "kvtier_asked_chunks_total", "model", "tenant") == {none: 4, ours: 5}
    assert values(served, "kvtier_found_chunks_total", "model", "tenant") == {none: 3, ours: 5}
    held = {("first", "1", "cpu"): 3 * FRAME, ("second", "2", "cpu"): 5 * FRAME}
    told = values(served, "kvtier_held_bytes", "model", "namespace", "tier")
    assert {labels: told[labels] for labels in held} == held
    assert values(served, "kvtier_sessions", "model", "namespace") == {("first", "1"): 1, ("second", "2"): 1}
    assert values(served, "kvtier_tenant_bytes", "tenant") == {(ANONYMOUS,): 3 * FRAME, (tenant,): 5 * FRAME}
    quotas = {(ANONYMOUS, "hard"): 32 * FRAME, (tenant, "hard"): 32 * FRAME}
    assert values(served, "kvtier_tenant_quota_bytes", "tenant", "quota") == quotas
    (lent, free), (memory,) = (
        [values(served, name)[()] for name in ("kvtier_lent_slots", "kvtier_free_bytes")],
        values(served, "kvtier_memory_bytes", "tier").values(),
    )
    assert memory == 64 * FRAME and 8 <= lent <= 64 and 0 <= free <= memory - 8 * FRAME


def test_of_an_engine_that_ends_no_request_the_oldest_count_as_done(served, monkeypatch):
    monkeypatch.setattr("kvtier_serve.sessions._MOST_LOOKUPS", 2)
    stack = served.stack("model")
    for number in range(5):
        stack.lookup(make_keys(4), f"request {number}")
    (session,) = served.server.sessions.values()
    assert len(session._looked) == 2
    assert values(served, "kvtier_asked_chunks_total", "model") == {("model",): 3 * 4}


def test_closed_namespaces_leave_no_series_and_no_stack_and_sums_never_fall(served):
    stack = served.stack("model")
    store(stack, make_keys(3))
    stack.drain(HANG)
    stack.lookup(make_keys(3), "request")
    stack.release("request")
    stack.drain(HANG)
    counted = "kvtier_chunks_total", "kvtier_found_chunks_total"
    before = {name: values(served, name, "model") for name in counted}
    (space,) = served.server.spaces
    closed = weakref.ref(space.stack)
    del space
    stack.close()
    for number in range(9):  # so many stacks without engines are not kept
        served.stack(f"later {number}").close()
    served.stack("last")
    wait_until(lambda: ("model", "1") not in values(served, "kvtier_sessions", "model", "namespace"))
    for name, was in before.items():
        now = values(served, name, "model")
        assert all(now[label] >= value > 0 for label, value in was.items())
    assert not any(
        sample.labels.get("namespace") == "1" for family in families(served).values() for sample in family.samples
    )
    gc.collect()
    assert closed() is None


def test_tenants_beyond_the_first_are_counted_together():
    tenants = Tenants()
    for number in range(100):
        tenants.looked("model", tenants.name(str(number).encode()), 2, 1)
    assert len(tenants.lookups) == 65
    assert tenants.lookups["model", "others"] == (72, 36)


def test_programs_run_and_end(served):
    wait_until(lambda: values(served, "kvtier_program_running", "program") == {("sleeps",): 1})
    (killed,) = (each.process for each in served.server.programs.conditions().values())
    assert values(served, "kvtier_program_ends_total", "program") == {("sleeps",): 0}
    os.kill(killed, signal.SIGKILL)
    wait_until(lambda: values(served, "kvtier_program_ends_total", "program") == {("sleeps",): 1})
    wait_until(lambda: values(served, "kvtier_program_running", "program") == {("sleeps",): 1})
