"""docs/metrics.md and the dashboard know the table of metrics, all of it and nothing else."""

from __future__ import annotations

import importlib
import json
import re

import pytest
from source_copy import ROOT

from kvtier_core.config.load import load_config
from kvtier_core.config.open import open_observers
from kvtier_core.config.registry import Registry
from kvtier_core.telemetry.metrics import METRICS, MetricType
from kvtier_core.telemetry.readings import DECLINED, NOT_ASKED, Readings
from kvtier_core.types import Event, EventKind, Usage, WriteUse
from kvtier_serve.operators.metrics import OF_A_SERVER
from kvtier_testing.samples import make_context

DOCUMENT = (ROOT / "docs/metrics.md").read_text()
DASHBOARD = json.loads((ROOT / "examples/grafana.json").read_text())
PANELS = DASHBOARD["panels"]
OF_A_NAME = {metric.name: metric for metric in METRICS}
_SUFFIXES = {
    MetricType.COUNTER: ("_total",),
    MetricType.GAUGE: ("",),
    MetricType.HISTOGRAM: ("_bucket", "_sum", "_count"),
}
SHOWN = {metric.name + suffix: metric for metric in METRICS for suffix in _SUFFIXES[metric.type]}
#: What Grafana calls the units in which something is told, or in which it grows.
UNITS = {
    "tokens": {"suffix: tokens/s"},
    "seconds": {"s", "suffix: s/s"},
    "bytes": {"bytes", "Bps"},
    "chunks": {"suffix: chunks/s"},
    "slots": {"short"},
    "": {"bool_on_off"},
}


def test_the_document_has_the_tables_of_the_code():
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in DOCUMENT.splitlines() if "| `kvtier_" in line
    ]
    suffix = {MetricType.COUNTER: "_total"}
    assert rows == [
        [
            f"`{metric.name}{suffix.get(metric.type, '')}`",
            metric.type.value,
            metric.unit,
            ", ".join(metric.labels),
            metric.text,
        ]
        for metric in (*METRICS, *OF_A_SERVER)
    ]


def test_the_document_names_no_other_metric():
    named = set(re.findall(r"\bkvtier_[a-z_]+\b", DOCUMENT)) - {"kvtier_observers", "kvtier_core", "kvtier_testing"}
    assert {name.removesuffix("_total") for name in named} == {metric.name for metric in (*METRICS, *OF_A_SERVER)}


def test_names_and_units_are_as_prometheus_has_them():
    assert all(metric.labels[0] == "tier" for metric in METRICS)
    for metric in (*METRICS, *OF_A_SERVER):
        assert re.fullmatch(r"kvtier_[a-z]+(_[a-z]+)*", metric.name) and metric.text
        if metric.type is not MetricType.GAUGE:
            assert metric.unit and metric.name.endswith(metric.unit), "the unit comes last"


def test_every_event_is_read_as_rows_of_the_table():
    """And each row of the table is read from some event."""
    usage = Usage("disk", chunks=1, nbytes=2, capacity=3, writes=WriteUse(4, 5, 6, 7, 8))
    events = [
        Event(kind, "disk", (), 5, "for room", 0.5, 7, usage if kind is EventKind.USAGE else None) for kind in EventKind
    ]
    read = Readings().add(events)
    assert {reading.metric for reading in read} == OF_A_NAME.keys()
    for reading in read:
        assert len(reading.labels) == len(OF_A_NAME[reading.metric].labels), reading


def test_each_count_of_an_event_is_made_once():
    keys = (b"a" * 32, b"b" * 32)
    (reading, seconds, nbytes) = Readings().add([Event(EventKind.EVICTED, "disk", keys, 10, "for room", 0.5)])
    assert reading == ("kvtier_evicted_chunks", ("disk", "for room"), 2)
    assert seconds == ("kvtier_operation_seconds", ("disk", "delete"), 0.5)
    assert nbytes == ("kvtier_moved_bytes", ("disk", "delete"), 10)
    told = Readings().add([Event(EventKind.STORED, "cpu", keys, 10, seconds=4.2)])
    assert [reading.metric for reading in told] == ["kvtier_chunks", "kvtier_moved_bytes"], "4.2 s are the step's"
    asked = Event(EventKind.ASKED, "redis", (), seconds=0.5)
    assert Readings().add([asked])[0] == ("kvtier_chunks", ("redis", "asked"), 0), "it was asked for more, and has none"
    saved = Readings()
    saved.add([Event(EventKind.AVOIDED, "disk", seconds=3.0)])
    *_, net = saved.add([Event(EventKind.WAITED, "disk", seconds=1.0)])
    assert net == ("kvtier_net_seconds_saved", ("disk",), 2.0)


def test_the_reasons_of_bypasses_are_documented():
    assert f"`{DECLINED}`" in DOCUMENT and f"`{NOT_ASKED}`" in DOCUMENT


def test_the_observer_of_the_document_works(tmp_path, monkeypatch, capsys):
    (source,) = re.findall(r"```python\n(.*?)```", DOCUMENT, re.DOTALL)
    (tmp_path / "rings_a_bell.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    plugin = importlib.import_module("rings_a_bell")
    written = {"version": 1, "tiers": [{"type": "heap", "capacity": "1GiB"}], "observers": [{"type": "bell"}]}
    ((_, observer),) = open_observers(load_config(written, Registry.of(plugin)), make_context())
    observer.observe([Event(EventKind.BREAKER_OPEN, "cpu")])
    assert capsys.readouterr().out == ""
    observer.observe([Event(EventKind.BREAKER_OPEN, "disk")])
    assert capsys.readouterr().out == "\a"


def test_the_configuration_of_the_document_is_one(tmp_path):
    (written,) = re.findall(r"```yaml\n(.*?)```", DOCUMENT, re.DOTALL)
    file = tmp_path / "kvtier.yaml"
    file.write_text(written.replace("type: cpu", "type: heap"))
    assert [each.type for each in load_config(file, Registry.discover()).observers] == ["prometheus", "jsonl"]


# -- the dashboard -------------------------------------------------------------------------------------


def test_the_dashboard_is_one_that_grafana_loads():
    assert DASHBOARD["schemaVersion"] >= 36 and DASHBOARD["title"] == DASHBOARD["uid"] == "kvtier"
    (source,) = DASHBOARD["templating"]["list"]
    assert (source["type"], source["query"]) == ("datasource", "prometheus")
    assert len({panel["id"] for panel in PANELS}) == len(PANELS)
    taken = set()
    for panel in PANELS:
        at = panel["gridPos"]
        cells = {(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])}
        assert max(x for x, _ in cells) < 24 and taken.isdisjoint(cells), panel["title"]
        taken |= cells
        assert panel["type"] == "timeseries" and panel["title"] and panel["description"]
        references = [target["refId"] for target in panel["targets"]]
        assert len(set(references)) == len(references) > 0
        for each in (panel, *panel["targets"]):
            assert each["datasource"] == {"type": "prometheus", "uid": f"${{{source['name']}}}"}


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel["title"])
def test_a_panel_asks_for_what_is_there_in_its_unit(panel):
    unit = panel["fieldConfig"]["defaults"]["unit"]
    for target in panel["targets"]:
        names = re.findall(r"\bkvtier_[a-z_]+\b", target["expr"])
        assert names, "it asks for nothing of ours"
        metrics = [SHOWN[name] for name in names]
        assert target["expr"].count("(") == target["expr"].count(")")
        labels = {label for listed in re.findall(r"by \(([^)]*)\)", target["expr"]) for label in listed.split(", ")}
        labels |= set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) | set(
            re.findall(r"(\w+)=~", target["expr"])
        )
        for metric in metrics:
            assert labels <= {*metric.labels, "le"}, target["expr"]
            counts = metric.type is not MetricType.GAUGE
            assert counts == (f"rate({target['expr'][target['expr'].index(metric.name) :]}" in target["expr"])
        if " / " in target["expr"]:
            assert unit == "percentunit" and len({metric.unit for metric in metrics}) == 1
        else:
            assert {unit} <= UNITS[metrics[0].unit]


def test_everything_in_the_table_is_on_the_dashboard_or_can_be_had_from_it():
    asked = {
        SHOWN[name].name
        for panel in PANELS
        for target in panel["targets"]
        for name in re.findall(r"\bkvtier_[a-z_]+\b", target["expr"])
    }
    of_tokens = {f"kvtier_{outcome}_tokens" for outcome in ("blended", "handed_over", "not_kept", "withheld")}
    of_few_tiers = {"kvtier_writable_bytes"}
    not_shown = {"kvtier_avoided_seconds", "kvtier_held_chunks", *of_tokens, *of_few_tiers}
    assert OF_A_NAME.keys() - asked == not_shown
