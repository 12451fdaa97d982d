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
from kvtier_core.storekit import owner_socket
from kvtier_core.telemetry import metrics
from kvtier_core.telemetry.metrics import BUCKETS, METRICS, MetricType
from kvtier_core.telemetry.readings import Reading, Readings
from kvtier_core.types import Event
from kvtier_core.work.io_pool import run_aside

logger = logging.getLogger("kvtier")

#: Seconds that a client may keep the only thread waiting for its request, however often it sends something.
_PATIENCE = 5.0
_FAMILIES: dict[MetricType, type[CounterMetricFamily] | type[GaugeMetricFamily]] = {
    MetricType.COUNTER: CounterMetricFamily,
    MetricType.GAUGE: GaugeMetricFamily,
}


class Values:
    """The values of a table of metrics.

    prometheus_client's own metrics are not used: with several API servers they would appear at vLLM's endpoint too.
    """

    def __init__(self, own: Sequence[str], table: Sequence[metrics.Metric] = METRICS):
        """``own`` are the labels that every metric has before those of the ``table``."""
        self._own = own
        self._table = {metric.name: metric for metric in table}
        self._lock = threading.Lock()  # one thread counts, another serves
        self._values: dict[str, dict[tuple[str, ...], float]] = {name: {} for name in self._table}
        self._counts: dict[str, dict[tuple[str, ...], Counter[float]]] = {name: {} for name in self._table}

    def add(self, readings: Iterable[Reading], *own: str) -> None:
        """Count these readings, with the values of their ``own`` labels."""
        with self._lock:
            for name, its, value in readings:
                values, labels, type = self._values[name], (*own, *its), self._table[name].type
                values[labels] = value if type is MetricType.GAUGE else values.get(labels, 0) + value
                if type is MetricType.HISTOGRAM:
                    counts = self._counts[name].setdefault(labels, Counter())
                    counts[next((bound for bound in BUCKETS if value <= bound), float("inf"))] += 1

    def collect(self) -> Iterator[Metric]:
        """For a registry of prometheus_client."""
        with self._lock:
            return iter([self._family(metric) for metric in self._table.values()])

    def _family(self, metric: metrics.Metric) -> Metric:
        names, values = [*self._own, *metric.labels], self._values[metric.name].items()
        if metric.type is MetricType.HISTOGRAM:
            histogram = HistogramMetricFamily(metric.name, metric.text, labels=names)
            for labels, value in values:
                histogram.add_metric(labels, self._buckets(metric.name, labels), value)
            return histogram
        family = _FAMILIES[metric.type](metric.name, metric.text, labels=names)
        for labels, value in values:
            family.add_metric(labels, value)
        return family

    def _buckets(self, name: str, labels: tuple[str, ...]) -> list[tuple[str, float]]:
        """Each bound, with the number of values up to it."""
        counts, so_far = self._counts[name][labels], 0
        buckets: list[tuple[str, float]] = []
        for bound in (*BUCKETS, float("inf")):
            so_far += counts[bound]
            buckets.append(("+Inf" if bound == float("inf") else str(bound), so_far))
        return buckets


class Endpoint(Observer):
    """Serves the metrics until it is closed, one client at a time."""

    def __init__(self, engine: int, address: tuple[str, int] | pathlib.Path, *, trial: bool = False):
        """``engine`` is the number of the replica, ``address`` a host and a port, or a Unix socket. Raises OSError.

        ``trial``: see `owner_socket.listen`.
        """
        self._readings = Readings()
        self._engine = str(engine)
        self._values = Values(["engine"])
        registry = CollectorRegistry(auto_describe=False)
        registry.register(self._values)
        handler = type("Handler", (_Handler,), {"registry": registry, "timeout": _PATIENCE})
        self._path = address if isinstance(address, pathlib.Path) else None
        self._server: _Server
        if isinstance(address, pathlib.Path):
            self._server = _OwnersSocket(address, handler, trial)
        else:
            self._server = _TCPServer(address, handler)
        logger.info("kvtier: metrics at %s", self.address)
        self._thread = run_aside(lambda: self._server.serve_forever(poll_interval=0.1), "metrics")

    @property
    def address(self) -> str:
        """The address at which it serves: a URL, or the path of a socket."""
        if self._path is not None:
            return str(self._path)
        host, port = map(str, self._server.server_address[:2])
        return f"http://{f'[{host}]' if ':' in host else host}:{port}/metrics"

    def observe(self, events: Sequence[Event]) -> None:
        """Count them."""
        self._values.add(self._readings.add(events), self._engine)

    def close(self) -> None:
        """Stop serving, and hang up on a client that is still asking."""
        self._server.hang_up()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Handler(MetricsHandler):
    def setup(self) -> None:
        super().setup()
        self.rfile = io.BufferedReader(_UntilDeadline(self.connection, time.monotonic() + _PATIENCE))

    def do_HEAD(self) -> None:
        """The headers alone."""
        self.do_GET()

    def end_headers(self) -> None:
        super().end_headers()
        if self.command == "HEAD":
            self.wfile = io.BytesIO()


class _UntilDeadline(io.RawIOBase):
    """The bytes that a client sends until ``deadline``. The socket's own timeout would restart with every byte."""

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
        """Serve the request, unless the server is closing."""
        self._client = request  # before it reads `_closing`, so that `hang_up` misses none
        return not self._closing

    def hang_up(self) -> None:
        """Serve no client any more. Called on another thread."""
        self._closing = True
        if self._client is not None:
            with contextlib.suppress(OSError):  # it has hung up
                self._client.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: object, client: object) -> None:
        """Report nothing: a client may hang up."""


class _TCPServer(_Server):
    allow_reuse_address = True

    def __init__(self, address: tuple[str, int], handler: type):
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        super().__init__(address, handler)


class _OwnersSocket(_Server, socketserver.UnixStreamServer):
    def __init__(self, path: pathlib.Path, handler: type, trial: bool):
        self._trial = trial
        super().__init__(str(path), handler)

    def server_bind(self) -> None:
        """Bind, in place of the socket that a killed engine left."""
        self.socket.close()
        path = pathlib.Path(str(self.server_address))
        self.socket = owner_socket.listen(path, self.request_queue_size, trial=self._trial)

    def get_request(self) -> tuple[socket.socket, tuple[str, int]]:
        """A handler expects the address of a client, which a Unix socket lacks."""
        request, _ = super().get_request()
        return request, ("", 0)

    def verify_request(self, request: Any, client: object) -> bool:
        """Serve only this user and root."""
        return super().verify_request(request, client) and owner_socket.admits(request)
