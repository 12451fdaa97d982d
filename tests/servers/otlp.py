"""A collector of OpenTelemetry's spans, over HTTP."""

from __future__ import annotations

import http.server
import threading

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from patience import HANG


class Collector(http.server.ThreadingHTTPServer):
    """Receives spans over OTLP. A test decides when it answers."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), _Receiver)
        self.answers = threading.Event()
        self.answers.set()
        self.spans = []

    def __enter__(self):
        self._thread = threading.Thread(target=self.serve_forever, args=(0.05,))
        self._thread.start()
        return self

    def __exit__(self, *raised):
        self.answers.set()
        self.shutdown()
        self._thread.join()
        self.server_close()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}"


class _Receiver(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        assert self.server.answers.wait(HANG)
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            for scope in resource.scope_spans:
                self.server.spans += scope.spans
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *words):
        """Say nothing."""


def known_of(span):
    """The attributes of a span."""
    return {each.key: each.value.string_value or each.value.int_value for each in span.attributes}
