"""The metrics of a server: counters for each model, gauges for each of its namespaces.

Counters do not distinguish namespaces, so their sums do not fall when one is closed, and no series of it remains.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Iterator
from typing import Any
from weakref import WeakKeyDictionary

from prometheus_client.exposition import generate_latest

from kvtier_core.telemetry.metrics import METRICS, Metric, MetricType
from kvtier_core.telemetry.readings import Reading, Readings, readings_of
from kvtier_core.types import Event
from kvtier_observers.endpoint import Values
from kvtier_serve.server import Server
from kvtier_serve.sessions import Space
from kvtier_serve.tenants import OTHERS, UNBOUNDED

#: Prometheus' text format.
FORMAT = "text/plain; version=0.0.4; charset=utf-8"

#: Namespaces, and tenants, that the owner looks at between two calls of engines.
_SPACES, _TENANTS = 16, 128
_GAUGES = [metric for metric in METRICS if metric.type is MetricType.GAUGE]
_COUNTERS = [metric for metric in METRICS if metric.type is not MetricType.GAUGE]
_COUNTER, _GAUGE, _ = MetricType
_TENANT = ("model", "tenant")
#: Further metrics of `kvtier serve`.
OF_A_SERVER = (
    Metric("kvtier_asked_chunks", _COUNTER, "Chunks that requests looked for", _TENANT),
    Metric("kvtier_found_chunks", _COUNTER, "Chunks of these that could be loaded", _TENANT),
    Metric("kvtier_sessions", _GAUGE, "Engines that use the namespace", ("model", "namespace")),
    Metric("kvtier_lent_slots", _GAUGE, "Slots of an arena that the namespace has", ("model", "namespace", "tier")),
    Metric("kvtier_memory_bytes", _GAUGE, "Bytes of an arena for all namespaces together"),
    Metric("kvtier_free_bytes", _GAUGE, "Bytes of these that no namespace has"),
    Metric("kvtier_tenant_bytes", _GAUGE, "Bytes of the tenant's chunks in all arenas", ("tenant",)),
    Metric("kvtier_tenant_quota_bytes", _GAUGE, "Bytes that the tenant may have there", ("tenant", "quota")),
    Metric("kvtier_program_running", _GAUGE, "1 while the program runs", ("program",)),
    Metric("kvtier_program_ends", _COUNTER, "Ends that nobody asked for, and failed starts", ("program",)),
)


class ServerMetrics:
    """Counts what happens in a server, and looks at what it holds. The owner's thread calls every method."""

    def __init__(self, server: Server):
        self._server = server
        self._readings: WeakKeyDictionary[Space, Readings] = WeakKeyDictionary()
        self._counted = Values(["model"], _COUNTERS)
        server.spaces.listeners.append(self._observe)

    def _observe(self, space: Space, events: list[Event]) -> None:
        self._counted.add(self._readings.setdefault(space, Readings()).add(events), space.model)

    def of(self, space: Space) -> Readings:
        """The readings of what has happened in a namespace."""
        return self._readings.get(space) or Readings()

    def look(self) -> Generator[None, None, Snapshot]:
        """All metrics now."""
        held, others = Values(["model", "namespace"], _GAUGES), Values([], OF_A_SERVER)
        for number, space in enumerate(list(self._server.spaces)):
            for usage in space.stack.usage():
                held.add(readings_of(usage), space.model, str(space.number))
            others.add(_of_space(space))
            if number % _SPACES == _SPACES - 1:
                yield
        others.add(self._of_memories())
        others.add(self._of_programs())
        others.add((yield from self._of_tenants()))
        return Snapshot(self._counted, held, others)

    def _of_memories(self) -> Iterator[Reading]:
        for memory in self._server.spaces.memories:
            yield Reading("kvtier_memory_bytes", (memory.tier.name,), memory.extents.nbytes)
            yield Reading("kvtier_free_bytes", (memory.tier.name,), memory.extents.free_nbytes)

    def _of_programs(self) -> Iterator[Reading]:
        for name, condition in self._server.programs.conditions().items():
            yield Reading("kvtier_program_running", (name,), condition.process is not None)
            yield Reading("kvtier_program_ends", (name,), condition.ends)

    def _of_tenants(self) -> Generator[None, None, list[Reading]]:
        tenants, readings, used = self._server.spaces.tenants, [], Counter[str]()
        for number, tenant in enumerate(tenants.names):
            used[tenants.told_as(tenant)] += tenants.used_by(tenant)
            if number % _TENANTS == _TENANTS - 1:
                yield
        for (model, tenant), (asked, found) in tenants.lookups.items():
            readings.append(Reading("kvtier_asked_chunks", (model, tenant), asked))
            readings.append(Reading("kvtier_found_chunks", (model, tenant), found))
        for tenant, nbytes in used.items():
            readings.append(Reading("kvtier_tenant_bytes", (tenant,), nbytes))
            quota = UNBOUNDED if tenant == OTHERS else tenants.quota(tenant)
            limits = {"soft": quota.soft, "hard": quota.hard}
            readings += [
                Reading("kvtier_tenant_quota_bytes", (tenant, kind), limit)
                for kind, limit in limits.items()
                if limit is not None
            ]
        return readings


def _of_space(space: Space) -> Iterator[Reading]:
    labels = space.model, str(space.number)
    yield Reading("kvtier_sessions", labels, len(space.sessions))
    for arena in space.arenas:
        yield Reading("kvtier_lent_slots", (*labels, arena.name), arena.lent)


class Snapshot:
    """The metrics of one moment. Any thread may ask for them."""

    def __init__(self, *values: Values):
        self._values = values

    def collect(self) -> Iterator[Any]:
        """For prometheus_client."""
        for each in self._values:
            yield from (family for family in each.collect() if family.samples)

    def text(self) -> bytes:
        """The metrics in `FORMAT`."""
        return generate_latest(self)
