"""Which server has which frames: one server, the master that sentinels name, or the nodes of a cluster."""

from __future__ import annotations

import abc
import binascii
from collections import defaultdict
from collections.abc import Sequence

from kvtier_core.errors import BackendError
from kvtier_core.types import ChunkKey
from kvtier_redis.connecting import Address, Links, address_in
from kvtier_redis.deadline import Deadline
from kvtier_redis.settings import RedisSettings

_SLOTS = 1 << 14


class Servers(abc.ABC):
    """Raises BackendError. All methods may be called on any thread."""

    #: May one command name several frames?
    one: bool = True

    @abc.abstractmethod
    def of(self, name: bytes, deadline: Deadline) -> Address:
        """The server that has what is called so."""

    @abc.abstractmethod
    def all(self, deadline: Deadline) -> Sequence[Address]:
        """The servers that have all frames together."""

    def group(self, keys: Sequence[ChunkKey], deadline: Deadline) -> dict[Address, list[int]]:
        """The numbers of the keys by the server that has them; a key that no server has is left out."""
        return {self.of(b"", deadline): list(range(len(keys)))} if keys else {}

    def distrust(self) -> None:
        """A server failed, or said that another one is asked for: find out again before the next answer."""


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

    def __init__(self, settings: RedisSettings, links: Links):
        splits = [each.rpartition(":") for each in settings.sentinels]
        self._sentinels = [Address(host, int(port)) for host, _, port in splits]
        self._service = settings.service
        self._links = links
        self._master: Address | None = None

    def of(self, name: bytes, deadline: Deadline) -> Address:
        if (master := self._master) is None:
            master = self._master = self._ask_all(deadline)
        return master

    def all(self, deadline: Deadline) -> Sequence[Address]:
        return [self.of(b"", deadline)]

    def distrust(self) -> None:
        self._master = None

    def _ask_all(self, deadline: Deadline) -> Address:
        failures = []
        for number, sentinel in enumerate(self._sentinels):
            try:
                return self._ask(sentinel, deadline.share(len(self._sentinels) - number + 1))
            except OSError as error:
                failures.append(f"{sentinel}: {error.strerror or error}")
            except BackendError as error:
                failures.append(f"{sentinel}: {error}")
        raise BackendError(f"no sentinel names the master of {self._service}: {'; '.join(failures)}")

    def _ask(self, sentinel: Address, deadline: Deadline) -> Address:
        link = self._links.dialer.open(sentinel, deadline, log_in=False)
        try:
            answer = link.call("SENTINEL", "GET-MASTER-ADDR-BY-NAME", self._service)
        finally:
            link.close()
        if answer is None:
            raise BackendError("it does not know this service")
        try:
            host, port = answer
            return Address(host.decode(), int(port))
        except (ValueError, TypeError, AttributeError):
            raise BackendError("its answer is no address") from None


class Cluster(Servers):
    """The masters of a cluster, each with the slots that it serves."""

    one = False

    def __init__(self, url: str, links: Links):
        self._seed = address_in(url)
        self._links = links
        self._slots: list[Address | None] = [None] * _SLOTS
        self._known = [self._seed]  # whom to ask for the slots: masters and replicas
        self._stale = True

    def of(self, name: bytes, deadline: Deadline) -> Address:
        self._refresh(deadline)
        address = self._slots[slot_of(name)]
        if address is None:
            raise BackendError(f"{self._seed}: no node of the cluster serves the slot {slot_of(name)}")
        return address

    def all(self, deadline: Deadline) -> Sequence[Address]:
        self._refresh(deadline)
        return sorted({address for address in self._slots if address is not None})

    def group(self, keys: Sequence[ChunkKey], deadline: Deadline) -> dict[Address, list[int]]:
        self._refresh(deadline)
        groups = defaultdict(list)
        for number, key in enumerate(keys):
            address = self._slots[_slot(key.hex().encode())]
            if address is not None:
                groups[address].append(number)
        return groups

    def distrust(self) -> None:
        self._stale = True

    def _refresh(self, deadline: Deadline) -> None:
        if not self._stale:
            return
        failures = []
        for number, node in enumerate(known := self._known):
            try:
                with self._links.borrow(node, deadline.share(len(known) - number + 1)) as link:
                    self._learn(link.call("CLUSTER", "SLOTS"), node)
                return
            except BackendError as error:
                failures.append(str(error))
        raise BackendError(f"no node of the cluster says who serves what: {'; '.join(failures)}")

    def _learn(self, answer: object, told_by: Address) -> None:
        """Take over what CLUSTER SLOTS said."""
        slots: list[Address | None] = [None] * _SLOTS
        masters, replicas = [], []
        try:
            for first, last, *nodes in answer:
                places = [Address(node[0].decode() or told_by.host, int(node[1])) for node in nodes]
                slots[first : last + 1] = [places[0]] * (last + 1 - first)
                masters.append(places[0])
                replicas.extend(places[1:])
        except (ValueError, TypeError, AttributeError, IndexError):
            raise BackendError("its answer names no nodes") from None
        if len(slots) != _SLOTS:
            raise BackendError("its answer names other slots than there are")
        self._slots, self._stale = slots, False
        self._known = list(dict.fromkeys([told_by, *masters, *replicas, self._seed]))


def servers_of(settings: RedisSettings, links: Links) -> Servers:
    """As the settings say."""
    if settings.mode == "cluster":
        return Cluster(settings.url, links)
    if settings.mode == "sentinel":
        return Sentinels(settings, links)
    return OneServer(settings.url)


def slot_of(name: bytes) -> int:
    """The slot of a cluster in which a name is: that of what stands in the first braces, if anything does."""
    begin = name.find(b"{") + 1
    end = name.find(b"}", begin) if begin else -1
    return _slot(name[begin:end] if end > begin else name)


def _slot(tag: bytes) -> int:
    return binascii.crc_hqx(tag, 0) % _SLOTS
