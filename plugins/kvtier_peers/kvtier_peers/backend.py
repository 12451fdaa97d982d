"""Finds frames in the memory of other nodes, and shows them what is in this one's."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import OrderedDict, defaultdict
from collections.abc import Mapping, Sequence

from kvtier_core.errors import BackendError
from kvtier_core.interfaces import Backend, OpenContext
from kvtier_core.types import ChunkKey
from kvtier_peers.link import MOST_KEYS, Door
from kvtier_peers.listener import listen
from kvtier_peers.peer import Peer
from kvtier_peers.roster import Roster
from kvtier_peers.settings import Address, PeersSettings

#: Keys for which it is remembered who shows their frames.
_REMEMBERED = 1 << 16


class PeersBackend(Backend):
    """Every node shows the others the frames of its hottest arena, and asks all of them for what it lacks."""

    shared = True

    def __init__(self, config: PeersSettings, ctx: OpenContext):
        self._timeout = ctx.timeout
        self._door = Door.of(config, ctx.namespace)
        self._secured = "TLS" if config.key else "a token" if config.token else "loopback alone"
        self._peers: dict[Address, Peer] = {}
        self._holders: OrderedDict[ChunkKey, tuple[Peer, ...]] = OrderedDict()  # the keys asked for last are at the end
        self._lock = threading.Lock()
        self._closed = False
        host, port = Address.of(config.address)
        self._address = Address(host, port + ctx.replica)
        self._sealed = ctx.sealed
        self._listener = listen(self._address, self._door, ctx.sealed)
        self._roster = Roster(config, renewed=self._there)
        self._there()

    def contains(self, keys: Sequence[ChunkKey]) -> Sequence[bool]:
        holders: dict[ChunkKey, list[Peer]] = {key: [] for key in keys}
        for begin in range(0, len(keys), MOST_KEYS):
            self._ask(keys[begin : begin + MOST_KEYS], holders)
        with self._lock:
            for key in keys:
                self._holders.pop(key, None)
                if holders[key]:
                    self._holders[key] = tuple(holders[key])
            while len(self._holders) > _REMEMBERED:
                self._holders.popitem(last=False)
        return [bool(holders[key]) for key in keys]

    def _ask(self, keys: Sequence[ChunkKey], holders: Mapping[ChunkKey, list[Peer]]) -> None:
        """Ask all peers before an answer is awaited."""
        ends = time.monotonic() + self._timeout
        asked = {}
        for peer in self._there():
            with contextlib.suppress(BackendError):
                asked[peer] = peer.ask(keys, ends)
        for peer, link in asked.items():
            with contextlib.suppress(BackendError):
                for key, is_there in zip(keys, peer.presence(link, len(keys)), strict=True):
                    if is_there:
                        holders[key].append(peer)

    def read(self, keys: Sequence[ChunkKey], into: Sequence[memoryview]) -> Sequence[int | BackendError]:
        ends = time.monotonic() + self._timeout
        outcomes: list[int | BackendError] = [0] * len(keys)
        self.contains([key for key in keys if key not in self._holders])
        with self._lock:
            holders = {number: list(self._holders.get(key, ())) for number, key in enumerate(keys)}
        while (groups := _by_peer(holders)) and time.monotonic() < ends:
            for peer, numbers in groups.items():
                answers = _read(peer, [keys[each] for each in numbers], [into[each] for each in numbers], ends)
                for number, answer in zip(numbers, answers, strict=True):
                    outcomes[number] = answer
                    is_read = isinstance(answer, int) and answer > 0
                    holders[number] = [] if is_read else [each for each in holders[number] if each is not peer]
        return outcomes

    def write(self, keys: Sequence[ChunkKey], frames: Sequence[memoryview]) -> None:
        raise BackendError("frames of peers are written by their engines alone")

    def delete(self, keys: Sequence[ChunkKey]) -> None:
        """What peers have in memory is theirs."""

    def facts(self) -> Mapping[str, str]:
        peers = {str(peer.address): peer.state for peer in list(self._peers.values())}
        return {"listen": str(self._address), "secured by": self._secured, **peers}

    def close(self) -> None:
        with self._lock:
            self._closed = True
        for peer in self._peers.values():
            peer.close()
        self._listener.hide(self._sealed)

    def _there(self) -> list[Peer]:
        """The peers to ask now. Others are connected to."""
        addresses = self._roster.addresses()
        with self._lock:
            if self._closed:
                return []
            for address in self._peers.keys() - addresses:
                self._peers.pop(address).close()
            for address in addresses - self._peers.keys():
                self._peers[address] = Peer(address, self._door, self._listener.door.number)
            peers = list(self._peers.values())
        return [peer for peer in peers if peer.is_there()]


def _read(peer: Peer, keys: Sequence[ChunkKey], into: Sequence[memoryview], ends: float) -> list[int | BackendError]:
    """Read from one peer. Those that were received before it failed are whole."""
    outcomes: list[int | BackendError] = []
    try:
        for nbytes in peer.read(keys, into, ends):
            outcomes.append(nbytes)
    except BackendError as error:
        outcomes += [error] * (len(keys) - len(outcomes))
    return outcomes


def _by_peer(holders: dict[int, list[Peer]]) -> dict[Peer, list[int]]:
    """Which frames to read from which peer: of those that show one and are there, the fastest of late."""
    groups = defaultdict(list)
    for number, peers in holders.items():
        there = [peer for peer in peers if peer.is_there()]
        if there:
            groups[min(there, key=lambda peer: peer.seconds_per_byte)].append(number)
    return groups
