"""Which server has which frames: one server, the master that sentinels name, or the nodes of a cluster."""

from __future__ import annotations

import abc
from collections import defaultdict
from collections.abc import Mapping, Sequence

from redis.cluster import ClusterNode, NodesManager
from redis.crc import key_slot
from redis.sentinel import MasterNotFoundError, Sentinel

from kvtier_core.errors import BackendError
from kvtier_core.types import ChunkKey
from kvtier_redis.connecting import FAILURES, NO_RETRY, Address, Dialer, address_in, named
from kvtier_redis.link import Deadline
from kvtier_redis.settings import RedisSettings


class Servers(abc.ABC):
    """Raises BackendError. All methods may be called on any thread."""

    #: May one command name several frames?
    one: bool = True

    @abc.abstractmethod
    def of(self, name: bytes, deadline: Deadline) -> Address:
        """The server that has the value of this name."""

    @abc.abstractmethod
    def all(self, deadline: Deadline) -> Sequence[Address]:
        """The servers that together have all frames."""

    def group(self, keys: Sequence[ChunkKey], deadline: Deadline) -> dict[Address, list[int]]:
        """The numbers of the keys by the server that has them; a key that no server has is left out."""
        return {self.of(b"", deadline): list(range(len(keys)))} if keys else {}

    def distrust(self) -> None:
        """A server failed, or named another: find out again before the next answer."""


class OneServer(Servers):
    """The server of the url."""

    def __init__(self, url: str):
        self._address = address_in(url)

    def of(self, name: bytes, deadline: Deadline) -> Address:
        return self._address

    def all(self, deadline: Deadline) -> Sequence[Address]:
        return [self._address]


class Sentinels(Servers):
    """The server that the sentinels call the master of a service."""

    def __init__(self, settings: RedisSettings, dialer: Dialer):
        splits = [each.rpartition(":") for each in settings.sentinels]
        self._sentinels = [(host, int(port)) for host, _, port in splits]
        self._service = settings.service
        self._dialer = dialer
        self._master: Address | None = None

    def of(self, name: bytes, deadline: Deadline) -> Address:
        if (master := self._master) is None:
            master = self._master = self._ask(deadline.share(len(self._sentinels) + 1))
        return master

    def all(self, deadline: Deadline) -> Sequence[Address]:
        return [self.of(b"", deadline)]

    def distrust(self) -> None:
        self._master = None

    def _ask(self, each: Deadline) -> Address:
        options = {**self._dialer.options(each), "ssl": bool(self._dialer.tls), "retry": NO_RETRY}
        group = Sentinel(self._sentinels, sentinel_kwargs=options)
        try:
            host, port = group.discover_master(self._service)
            return Address(str(host), int(port))
        except MasterNotFoundError:  # it shows connections with all their settings
            asked = ", ".join(f"{host}:{port}" for host, port in self._sentinels)
            raise BackendError(f"none of the sentinels {asked} knows a running master of {self._service}") from None
        except FAILURES as error:
            raise named(f"the sentinels of {self._service}", error) from error
        finally:
            for client in group.sentinels:
                client.close()


class Cluster(Servers):
    """The masters of a cluster, each with the slots that it serves."""

    one = False

    def __init__(self, url: str, dialer: Dialer):
        self._seed = address_in(url)
        self._dialer = dialer
        self._slots: Mapping[int, Address] = {}
        self._known = {self._seed}  # servers to ask for the slots: masters and replicas
        self._stale = True

    def of(self, name: bytes, deadline: Deadline) -> Address:
        self._refresh(deadline)
        address = self._slots.get(key_slot(name))
        if address is None:
            raise BackendError(
                f"{self._seed}: no node of the cluster serves the slot {key_slot(name)}; see CLUSTER INFO"
            )
        return address

    def all(self, deadline: Deadline) -> Sequence[Address]:
        self._refresh(deadline)
        return sorted(set(self._slots.values()))

    def group(self, keys: Sequence[ChunkKey], deadline: Deadline) -> dict[Address, list[int]]:
        self._refresh(deadline)
        groups = defaultdict(list)
        for number, key in enumerate(keys):
            address = self._slots.get(key_slot(key.hex().encode()))
            if address is not None:
                groups[address].append(number)
        return groups

    def distrust(self) -> None:
        self._stale = True

    def _refresh(self, deadline: Deadline) -> None:
        if not self._stale:
            return
        known = [ClusterNode(*each) for each in self._known]
        options = {**self._dialer.options(deadline.share(len(known) + 1)), **self._dialer.login}
        try:
            nodes = NodesManager(known, ssl=bool(self._dialer.tls), **options)  # asks them, until one knows all slots
        except FAILURES as error:
            raise named(f"the cluster of {self._seed}", error) from error
        self._slots = {slot: _address(masters[0]) for slot, masters in nodes.slots_cache.items()}
        self._known = {self._seed, *map(_address, nodes.nodes_cache.values())}
        self._stale = False
        nodes.close()


def _address(node: ClusterNode) -> Address:
    return Address(str(node.host), int(node.port))


def servers_of(settings: RedisSettings, dialer: Dialer) -> Servers:
    if settings.mode == "cluster":
        return Cluster(settings.url, dialer)
    if settings.mode == "sentinel":
        return Sentinels(settings, dialer)
    return OneServer(settings.url)
