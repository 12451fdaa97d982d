"""Finds frames in the memory of other nodes, and shows them what is in this one's."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence

from kvtier_core.errors import BackendError
from kvtier_core.interfaces import Backend, OpenContext
from kvtier_core.types import ChunkKey
from kvtier_peers.digest import holders
from kvtier_peers.link import Door
from kvtier_peers.listener import Shown, listen
from kvtier_peers.peer import Peer
from kvtier_peers.roster import Roster
from kvtier_peers.settings import Address, PeersSettings


class PeersBackend(Backend):
    """Every node shows the others the frames of its hottest arena and its stores, and reads from them what it lacks.

    Their digests say who has what. A peer without a fresh one has nothing: it is new, or silent.
    """

    shared = True

    def __init__(self, config: PeersSettings, ctx: OpenContext):
        self._timeout = ctx.timeout
        self._door = Door.of(config, ctx.namespace)
        self._secured = "TLS" if config.key else "a token" if config.token else "loopback alone"
        self._peers: dict[Address, Peer] = {}
        self._lock = threading.Lock()
        self._closed = False
        host, port = Address.of(config.address)
        self._address = Address(host, port + ctx.replica)
        self._shown = Shown(ctx.namespace.digest, ctx.sealed, ctx.stored)
        self._listener = listen(self._address, self._door, self._shown)
        self._roster = Roster(config, renewed=self._there)
        self._there()

    def contains(self, keys: Sequence[ChunkKey]) -> Sequence[bool]:
        return [bool(peers) for peers in self.holders(keys)]

    def holders(self, keys: Sequence[ChunkKey]) -> list[list[Peer]]:
        """For each key the peers that show its frame, or seem to. Nobody is asked."""
        return holders(keys, self._there())

    def read(self, keys: Sequence[ChunkKey], into: Sequence[memoryview]) -> Sequence[int | BackendError]:
        ends = time.monotonic() + self._timeout
        outcomes: list[int | BackendError] = [0] * len(keys)
        shown_by = dict(enumerate(self.holders(keys)))
        while (groups := _by_peer(shown_by)) and time.monotonic() < ends:
            for peer, numbers in groups.items():
                answers = _read(peer, [keys[each] for each in numbers], [into[each] for each in numbers], ends)
                for number, answer in zip(numbers, answers, strict=True):
                    outcomes[number] = answer
                    is_read = isinstance(answer, int) and answer > 0
                    shown_by[number] = [] if is_read else [each for each in shown_by[number] if each is not peer]
        return outcomes

    def write(self, keys: Sequence[ChunkKey], frames: Sequence[memoryview]) -> None:
        raise BackendError("frames of peers are written by their engines alone")

    def delete(self, keys: Sequence[ChunkKey]) -> None:
        """What peers have in memory is theirs."""

    def facts(self) -> Mapping[str, str]:
        peers = {str(peer.address): peer.state for peer in list(self._peers.values())}
        return {"listen": str(self._address), "secured by": self._secured, **peers}

    def trial(self) -> Mapping[str, str]:
        ends = time.monotonic() + self._timeout
        return {str(peer.address): peer.trial(ends) for peer in self._there()}

    def close(self) -> None:
        with self._lock:
            self._closed = True
        for peer in self._peers.values():
            peer.close()
        self._listener.hide(self._shown)

    def _there(self) -> list[Peer]:
        """The peers that may be read from now. Others are connected to."""
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
