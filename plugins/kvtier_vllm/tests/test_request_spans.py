"""Traces of a real engine's requests, as a collector receives them."""

from __future__ import annotations

from collections import defaultdict

from real_engines import cpu_and_disk, prompt
from servers.otlp import Collector, known_of
from vllm import SamplingParams

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


def test_a_request_that_waits_for_a_disk_is_traced_in_its_clients_trace(engine, tmp_path, monkeypatch):
    asked = prompt(150, 1100)
    with Collector() as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
        settings = {**cpu_and_disk(tmp_path), "observers": [{"type": "opentelemetry"}]}
        with engine(settings) as first:
            first.ask(asked)
        names = {span.name for span in collector.spans}
        assert names == {"kvtier request", "lookup cpu", "lookup disk", "store cpu", "write disk"}
        collector.spans.clear()
        with engine(settings) as second:
            vllm = second.llm.llm_engine
            headers = {"traceparent": f"00-{TRACE}-{SPAN}-01"}
            vllm.add_request(
                "theirs", {"prompt_token_ids": list(asked)}, SamplingParams(max_tokens=2), trace_headers=headers
            )
            second.settle()
    spans = defaultdict(list)
    for span in collector.spans:
        assert span.trace_id.hex() == TRACE
        assert 0 < span.start_time_unix_nano <= span.end_time_unix_nano
        spans[span.name].append(span)
    assert {"kvtier request", "lookup disk", "read disk", "wait disk", "load cpu"} <= set(spans)
    (whole,) = spans["kvtier request"]
    assert whole.parent_span_id.hex() == SPAN
    assert known_of(whole)["kvtier.tokens"] == 1100
    assert known_of(spans["lookup disk"][0])["kvtier.hit_tokens"] == 1088
    assert sum(known_of(span)["kvtier.chunks"] for span in spans["read disk"]) == 17
    for name in ("lookup disk", "read disk", "wait disk", "load cpu"):
        for span in spans[name]:
            assert span.parent_span_id == whole.span_id
            assert whole.start_time_unix_nano <= span.start_time_unix_nano
            assert span.end_time_unix_nano <= whole.end_time_unix_nano
