"""Finds frames in the memory of other nodes, and shows them what is in this one's."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from kvtier_core.errors import BackendError
from kvtier_core.interfaces import Backend, OpenContext
from kvtier_core.types import ChunkKey
from kvtier_peers.link import Door
from kvtier_peers.listener import Shown, listen
from kvtier_peers.peer import Peer
from kvtier_peers.roster import Roster
from kvtier_peers.settings import Address, PeersSettings
from kvtier_peers.table import DigestTable
from kvtier_peers.threads import started

#: Number of frames whose senders are remembered until they are verified: more than are ever read at once.
_MOST_SENDERS = 4096


class PeersBackend(Backend):
    """Each node shows the others the frames of its hottest arena and its stores, and reads from them what it lacks.

    Their digests report which peer has what. A peer without a fresh digest counts as empty: it is new, or silent.
    """

    shared = True

    def __init__(self, config: PeersSettings, ctx: OpenContext):
        self._timeout = ctx.timeout
        self._door = Door.of(config, ctx)
        self._secured = "TLS" if config.key else "a token" if config.token else "a secret of this account, on loopback"
        self._digests: DigestTable[Peer] = DigestTable()
        self._peers: dict[Address, Peer] = {}
        self._lock = threading.Lock()
        self._closed = False
        self._senders: dict[ChunkKey, Peer] = {}  # of the last frames
        host, port = Address.of(config.address)
        self._address = Address(host, port + ctx.replica)
        self._shown = Shown(ctx.namespace.digest, ctx.sealed, ctx.stored, ctx.copied)
        self._listener = listen(self._address, self._door, self._shown)
        self._roster = Roster(config, renewed=self._there)
        self._there()

    def contains(self, keys: Sequence[ChunkKey]) -> Sequence[bool]:
        return [bool(peers) for peers in self.holders(keys)]

    def holders(self, keys: Sequence[ChunkKey]) -> list[list[Peer]]:
        """For each key, the peers that show its frame, or seem to. No peer is asked."""
        there = set(self._there())
        return [[peer for peer in peers if peer in there] for peers in self._digests.holders(keys)]

    def read(self, keys: Sequence[ChunkKey], into: Sequence[memoryview]) -> Sequence[int | BackendError]:
        ends = time.monotonic() + self._timeout
        outcomes: list[int | BackendError] = [0] * len(keys)
        shown_by = dict(enumerate(self.holders(keys)))

        def read_from(peer: Peer, numbers: list[int]) -> None:
            answers = _read(peer, [keys[each] for each in numbers], [into[each] for each in numbers], ends)
            for number, answer in zip(numbers, answers, strict=True):
                outcomes[number] = answer
                is_read = isinstance(answer, int) and answer > 0
                shown_by[number] = [] if is_read else [each for each in shown_by[number] if each is not peer]
                if is_read:
                    self._sent_by(peer, keys[number])

        while (groups := _by_peer(shown_by)) and time.monotonic() < ends:
            _at_once([partial(read_from, peer, numbers) for peer, numbers in groups.items()])
        return outcomes

    def write(self, keys: Sequence[ChunkKey], frames: Sequence[memoryview]) -> None:
        raise BackendError("only the engines of peers write their frames")

    def delete(self, keys: Sequence[ChunkKey]) -> None:
        """Nothing: what peers have in memory is theirs."""

    def quarantine(self, keys: Sequence[ChunkKey]) -> None:
        """A peer's frames are its own, but one that sent a damaged frame is left alone: others may have it whole."""
        with self._lock:
            senders = {self._senders.pop(key) for key in keys if key in self._senders}
        for peer in senders:
            peer.blame()

    def _sent_by(self, peer: Peer, key: ChunkKey) -> None:
        with self._lock:
            self._senders[key] = peer
            if len(self._senders) > _MOST_SENDERS:
                del self._senders[next(iter(self._senders))]

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
        """The peers that may be read from now. Connections to the others begin."""
        addresses = self._roster.addresses()
        with self._lock:
            if self._closed:
                return []
            for address in self._peers.keys() - addresses:
                self._peers.pop(address).close()
            for address in addresses - self._peers.keys():
                self._peers[address] = Peer(address, self._door, self._listener.door.number, self._digests)
            peers = list(self._peers.values())
        return [peer for peer in peers if peer.is_there()]


def _read(peer: Peer, keys: Sequence[ChunkKey], into: Sequence[memoryview], ends: float) -> list[int | BackendError]:
    """Read from one peer. Frames that were received before it failed are whole."""
    outcomes: list[int | BackendError] = []
    try:
        for nbytes in peer.read(keys, into, ends):
            outcomes.append(nbytes)
    except BackendError as error:
        outcomes += [error] * (len(keys) - len(outcomes))
    return outcomes


def _at_once(reads: Sequence[Callable[[], None]]) -> None:
    """Read from several peers together, so that all peers that hang cost only one wait."""
    first, *others = reads
    threads = [(read, started(read, "peers-read")) for read in others]
    first()
    for read, thread in threads:
        thread.join() if thread else read()


def _by_peer(holders: dict[int, list[Peer]]) -> dict[Peer, list[int]]:
    """Which frames to read from which peer: of those that show it and are there, the one lately fastest."""
    groups = defaultdict(list)
    for number, peers in holders.items():
        there = [peer for peer in peers if peer.is_there()]
        if there:
            groups[min(there, key=Peer.seconds_per_byte)].append(number)
    return groups
