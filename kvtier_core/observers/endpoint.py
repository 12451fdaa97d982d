"""Counts events, and serves the counts over HTTP."""

from __future__ import annotations

import contextlib
import io
import logging
import pathlib
import socket
import socketserver
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import MetricsHandler
from prometheus_client.registry import CollectorRegistry

from kvtier_core.interfaces import Observer
from kvtier_core.observers import metrics
from kvtier_core.observers.metrics import BUCKETS, METRICS, MetricType
from kvtier_core.observers.readings import Reading, Readings
from kvtier_core.storekit import owner_socket
from kvtier_core.transfer.io_pool import run_aside
from kvtier_core.types import Event

logger = logging.getLogger("kvtier")

#: Seconds that a client may keep the only thread waiting for what it asks, however often it says something.
_PATIENCE = 5.0
_TYPES = {metric.name: metric.type for metric in METRICS}
_FAMILIES = {
    MetricType.COUNTER: CounterMetricFamily,
    MetricType.GAUGE: GaugeMetricFamily,
    MetricType.HISTOGRAM: HistogramMetricFamily,
}


class Values:
    """The metrics of one engine.

    prometheus_client's own metrics are not used: with several API servers they would appear at vLLM's endpoint too.
    """

    def __init__(self, engine: int):
        self._engine = str(engine)
        self._lock = threading.Lock()  # one thread counts, another one serves
        self._values: dict[str, dict[tuple[str, ...], float]] = {metric.name: {} for metric in METRICS}
        self._counts: dict[str, dict[tuple[str, ...], Counter[float]]] = {metric.name: {} for metric in METRICS}

    def add(self, readings: Iterable[Reading]) -> None:
        """Count these readings."""
        with self._lock:
            for name, labels, value in readings:
                values = self._values[name]
                values[labels] = value if _TYPES[name] is MetricType.GAUGE else values.get(labels, 0) + value
                if _TYPES[name] is MetricType.HISTOGRAM:
                    counts = self._counts[name].setdefault(labels, Counter())
                    counts[next((bound for bound in BUCKETS if value <= bound), float("inf"))] += 1

    def collect(self) -> Iterator[Metric]:
        """For a registry of prometheus_client."""
        with self._lock:
            return iter([self._family(metric) for metric in METRICS])

    def _family(self, metric: metrics.Metric) -> Metric:
        family = _FAMILIES[metric.type](metric.name, metric.text, labels=["engine", *metric.labels])
        for labels, value in self._values[metric.name].items():
            counts = [self._buckets(metric.name, labels)] if metric.type is MetricType.HISTOGRAM else []
            family.add_metric([self._engine, *labels], *counts, value)
        return family

    def _buckets(self, name: str, labels: tuple[str, ...]) -> list[tuple[str, float]]:
        """Each bound with how many values are not beyond it."""
        counts, so_far, buckets = self._counts[name][labels], 0, []
        for bound in (*BUCKETS, float("inf")):
            so_far += counts[bound]
            buckets.append(("+Inf" if bound == float("inf") else str(bound), so_far))
        return buckets


class Endpoint(Observer):
    """Serves the metrics until it is closed, one client at a time."""

    def __init__(self, engine: int, address: tuple[str, int] | pathlib.Path):
        """``engine`` is the number of the replica, ``address`` a host and a port, or a Unix socket. Raises OSError."""
        self._readings = Readings()
        self._values = Values(engine)
        registry = CollectorRegistry(auto_describe=False)
        registry.register(self._values)
        handler = type("Handler", (_Handler,), {"registry": registry, "timeout": _PATIENCE})
        self._path = address if isinstance(address, pathlib.Path) else None
        self._server = (_TCPServer if self._path is None else _OwnersSocket)(
            address if self._path is None else str(address), handler
        )
        logger.info("kvtier: metrics at %s", self.address)
        self._thread = run_aside(lambda: self._server.serve_forever(poll_interval=0.1), "metrics")

    @property
    def address(self) -> str:
        """Where it serves: a URL, or the path of a socket."""
        if self._path is not None:
            return str(self._path)
        host, port = self._server.server_address[:2]
        return f"http://{f'[{host}]' if ':' in host else host}:{port}/metrics"

    def observe(self, events: Sequence[Event]) -> None:
        """Count them."""
        self._values.add(self._readings.add(events))

    def close(self) -> None:
        """Serve no more, and hang up on a client that is still asking."""
        self._server.hang_up()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Handler(MetricsHandler):
    def setup(self) -> None:
        super().setup()
        self.rfile = io.BufferedReader(_UntilDeadline(self.connection, time.monotonic() + self.timeout))

    def do_HEAD(self) -> None:
        """The headers alone."""
        self.do_GET()

    def end_headers(self) -> None:
        super().end_headers()
        if self.command == "HEAD":
            self.wfile = io.BytesIO()


class _UntilDeadline(io.RawIOBase):
    """The bytes that a client sends until then. A timeout of the socket's own would begin anew with every byte."""

    def __init__(self, connection: socket.socket, deadline: float):
        self._connection = connection
        self._deadline = deadline

    def readable(self) -> bool:
        return True

    def readinto(self, into: Any) -> int:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self._connection.settimeout(left)
        return self._connection.recv_into(into)


class _Server(socketserver.TCPServer):
    _client: socket.socket | None = None
    _closing = False

    def verify_request(self, request: Any, client: object) -> bool:
        """Serve it, unless this is the end."""
        self._client = request  # before it looks, so that `hang_up` misses none
        return not self._closing

    def hang_up(self) -> None:
        """Serve nobody any more. Called on another thread."""
        self._closing = True
        if self._client is not None:
            with contextlib.suppress(OSError):  # it has hung up
                self._client.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: object, client: object) -> None:
        """A client that hangs up is no news."""


class _TCPServer(_Server):
    allow_reuse_address = True

    def __init__(self, address: tuple[str, int], handler: type):
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        super().__init__(address, handler)


class _OwnersSocket(_Server):
    address_family = socket.AF_UNIX

    def server_bind(self) -> None:
        """Bind, in place of what a killed engine has left."""
        self.socket.close()
        self.socket = owner_socket.listen(pathlib.Path(self.server_address), self.request_queue_size)

    def get_request(self) -> tuple[socket.socket, tuple[str, int]]:
        """A handler expects the address of a client, which a Unix socket has not."""
        request, _ = super().get_request()
        return request, ("", 0)
