"""A log of a store tier's requests, kept in its store and replayed when the tier is opened again.

After a restart its index and policy know when and how often each chunk was used, and the prefix tree. The log decides
only an order: entries for chunks that are not in the store, and damaged segments, are ignored.

It is written in segments, each of which is one frame and complete without the others: a lost one is a gap. Full ones
form a ring; the current one is written to two places in turn, so that one of them is always whole.
"""

from __future__ import annotations

import functools
import itertools
import math
import struct
from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Self

from kvtier_core.encoding.codec import FrameCodec
from kvtier_core.interfaces import Backend, SupportsListing
from kvtier_core.stack.index.cache_index import CacheIndex
from kvtier_core.stack.store_tier.policy_state import Kept, derived_key, key_of
from kvtier_core.types import FRAME_ALIGNMENT, FRAME_HEADER_NBYTES, KEY_NBYTES, ChunkKey, Namespace

#: Frames that the log has at most and at least: a tier without room for these has none.
_MOST, _LEAST = 64, 8
#: Bytes of a frame, at most. A segment of this length is 29 000 chunks, and some 5 MB in memory.
_LONGEST = 1 << 20
#: Chunks that are named in a replay, at most, and for how many a request counts whatever its length: a million take
#: 0.8 s, and 4.6 s in `gittins` where nothing could be compiled.
_REPLAYED, _EACH = 1 << 21, 8
#: The current segment is written before its minute is over when this number of chunks is new in it. On Mooncake's
#: conversation trace, a minute is a quarter of what a disk for a tenth of its chunks holds.
_FRESH = 1024
#: Times in the log are in units of this many seconds.
_TICK = 1e-6

#: Number of the segment, and of its requests and nodes. Then for each request its time and the node of its last chunk,
#: and for each node its parent, and its key.
_HEADER = struct.Struct("<QII")
_REQUEST_NBYTES, _NODE_NBYTES = 8 + 4, 4 + KEY_NBYTES


@functools.lru_cache(64)
def keys_beside(digest: bytes) -> tuple[ChunkKey, ...]:
    """The keys of everything that a tier with this namespace may store beside its chunks: first its policy's state."""
    return key_of(digest), *(derived_key(b"what was requested %d" % number, digest) for number in range(_MOST))


class _Segment:
    """Requests, and a tree of the keys that they name. Nodes are numbered from 1; 0 is above all of them."""

    def __init__(self, number: int):
        self.number = number
        self.times, self.ends = array("Q"), array("I")  # of each request, and the last node of its path
        self.parents, self.depths = array("I", [0]), array("I", [0])
        self.keys = [ChunkKey(b"")]
        self._nodes: dict[ChunkKey, int] = {}

    @classmethod
    def of(cls, payload: memoryview, keys_of: Callable[[Sequence[ChunkKey]], Sequence[ChunkKey]]) -> Self | None:
        """The segment that was `packed` under names, which ``keys_of`` turns into keys; None if it is not one."""
        number, requests, nodes = _HEADER.unpack_from(payload)
        segment, at = cls(number), _HEADER.size
        if at + requests * _REQUEST_NBYTES + nodes * _NODE_NBYTES > len(payload):
            return None
        for column, count in ((segment.times, requests), (segment.ends, requests), (segment.parents, nodes)):
            column.frombytes(payload[at : (at := at + count * column.itemsize)])
        keys = bytes(payload[at : at + nodes * KEY_NBYTES])
        names = [ChunkKey(keys[i : i + KEY_NBYTES]) for i in range(0, len(keys), KEY_NBYTES)]
        if max(segment.ends, default=0) > nodes or max((number, *segment.times)) >> 62:
            return None
        if not requests or segment.times != array("Q", sorted(segment.times)):
            return None
        for node, key in enumerate(keys_of(names), start=1):
            if (parent := segment.parents[node]) >= node:
                return None
            segment._add(key, parent)
        return segment

    def packed(self) -> tuple[bytes, Sequence[ChunkKey]]:
        """The segment but for its keys, and these."""
        header = _HEADER.pack(self.number, len(self.ends), len(self.keys) - 1)
        return header + self.times.tobytes() + self.ends.tobytes() + self.parents[1:].tobytes(), self.keys[1:]

    def add(self, path: Sequence[ChunkKey], time: int, room: int) -> bool:
        """Add a request, in time proportional to its new keys. False if the segment would exceed ``room`` bytes."""
        known, end = self._known(path)
        nodes = len(self.keys) - 1 + len(path) - known
        if _HEADER.size + (len(self.ends) + 1) * _REQUEST_NBYTES + nodes * _NODE_NBYTES > room:
            return False
        for key in path[known:]:
            self.parents.append(end)
            end = self._add(key, end)
        self.times.append(time)
        self.ends.append(end)
        return True

    def path(self, end: int) -> list[ChunkKey]:
        """The path of a request, root first."""
        path = []
        while end:
            path.append(self.keys[end])
            end = self.parents[end]
        return path[::-1]

    def _known(self, path: Sequence[ChunkKey]) -> tuple[int, int]:
        """Length of the longest beginning of a path that is here, and its last node."""
        for known in range(len(path), 0, -1):
            node = self._nodes.get(path[known - 1], 0)
            if self.depths[node] == known:
                return known, node
        return 0, 0

    def _add(self, key: ChunkKey, parent: int) -> int:
        node = self._nodes[key] = len(self.keys)
        self.keys.append(key)
        self.depths.append(self.depths[parent] + 1)
        return node


class _Packed(NamedTuple):
    """A segment on its way to the store."""

    place: ChunkKey
    columns: bytes  #: everything but the keys
    keys: Sequence[ChunkKey]


class _Changed(NamedTuple):
    """The frames of one save."""

    removal: Callable[[], object] | None  # comes first
    full: _Packed | None
    current: _Packed | None
    segment: _Segment  #: the current one, and the number of its requests
    requests: int


class RequestLog(Kept):
    """Logs requests, and replays them. In memory is the current segment, and a full one until it is stored."""

    def __init__(self, backend: Backend, codec: FrameCodec, room: int):
        """``room`` is the bytes of the tier that the log may take."""
        super().__init__(backend, codec)
        frame = min(codec.max_frame_nbytes, _LONGEST, room // _LEAST) // FRAME_ALIGNMENT * FRAME_ALIGNMENT
        # A tier that lists nothing knows no frames when it is opened.
        has_room = frame > FRAME_HEADER_NBYTES and not backend.shared and isinstance(backend, SupportsListing)
        self.nbytes = min(room // frame, _MOST) * frame if has_room else 0
        # One frame less than there is room for: a store may have an old one until the new one is whole.
        self._places = list(keys_beside(codec.namespace.digest)[1 : self.nbytes // frame]) if has_room else []
        self.frames = dict.fromkeys(self._places, frame)
        self.erasing = False  #: is something in the log still to be erased?
        self._length = frame - FRAME_HEADER_NBYTES
        self._longest = (self._length - _HEADER.size - _REQUEST_NBYTES) // _NODE_NBYTES
        self._open = has_room
        self._began = 0.0  # the time of which the log says 0
        self._last = 0  # time of the last request
        self._segment = _Segment(0)
        self._turn = 0  # the place of two that the current segment takes next
        self._stored = self._offered = 0  # of its requests those that are stored, of its nodes those given to the pool
        self._full: _Packed | None = None  # the segment before it, if it is not stored
        self._removal: Callable[[], object] | None = None  # deletes the stored log once it is obsolete

    def note(self, path: Sequence[ChunkKey], now: float) -> None:
        """A request names these chunks, root first. ``now`` is in seconds."""
        path = path[: self._longest]
        if not self._open or not path:
            return
        self._last = max(self._last, int((now - self._began) / _TICK))
        if not self._segment.add(path, self._last, self._length):
            ring = self._places[2:]
            self._full = _Packed(ring[self._segment.number % len(ring)], *self._segment.packed())
            self._next = now
            self._begin()
            self._segment.add(path, self._last, self._length)
        if len(self._segment.keys) - self._offered > _FRESH:
            self._next = now

    def forget(self, namespace: Namespace, *, erase: bool = False) -> None:
        """Nothing that was logged counts any more; with ``erase`` it cannot be read again, either.

        From now on the tier has this namespace. The log waits for its first one: no process could find another's keys.
        """
        self._open = bool(self._places) and namespace.digest == self._codec.namespace.digest
        if self._places:
            self.erasing |= erase
            remove = self._backend.erase if self.erasing else self._backend.delete
            self._removal = functools.partial(remove, self._places)
            self._full, self._next = None, -math.inf
            self._begin()

    def replay(self, index: CacheIndex, found: dict[ChunkKey, int], now: float) -> None:
        """Tell an empty index of the logged requests, as if the last one were ``now``, and of the frames that are here.

        ``found`` has the bytes of each, the oldest first. Each is admitted with the first request that names it. Those
        that none names come first; but last if they are younger than all others, because their requests were lost with
        the end of the log. Waits for the store.
        """
        requests = self._recall(now)
        logged = {key for _, path in requests for key in path}
        parts: dict[ChunkKey, list[ChunkKey]] = {}  # of chunks, if they have several
        last = 0  # number of frames up to the last that a request names
        for number, key in enumerate(found if logged else (), start=1):
            if (chunk := index.chunk_of(key)) in logged:
                last = number
                if chunk != key:
                    parts.setdefault(chunk, []).append(key)
        if requests:
            index.request((), requests[0][0], {})  # the policy's time begins
        older = [key for key in list(found)[:last] if index.chunk_of(key) not in logged]
        _admit(index, [(key, found.pop(key)) for key in older])
        for time, path in requests:
            index.request(path, time, {})
            for key, parent in zip(reversed(path), [*path[-2::-1], None], strict=True):
                for each in (key, *parts.get(key, ())):
                    if (nbytes := found.pop(each, None)) is not None:
                        index.admit([each], [parent], nbytes)
        _admit(index, found.items())

    def _recall(self, now: float) -> list[tuple[float, list[ChunkKey]]]:
        """The logged requests with their times, the oldest first. The segment of the last one is continued."""
        seal = self._codec.keyed_seal
        found: dict[int, _Segment] = {}
        for place, key in enumerate(self._places):
            if (payload := self._get(key, self._length)) is None:
                continue
            segment = _Segment.of(payload, seal.keys if seal else list)
            if segment and len(segment.ends) >= len(found.get(segment.number, segment).ends):
                found[segment.number] = segment
                if segment.number >= self._segment.number:
                    self._segment, self._stored, self._turn = segment, len(segment.ends), int(place == 0)
                    self._offered = len(segment.keys)
        self._last = max((segment.times[-1] for segment in found.values()), default=0)
        self._began = now - self._last * _TICK
        requests: list[tuple[float, list[ChunkKey]]] = []
        left = _REPLAYED
        for number in sorted(found, reverse=True):
            segment = found[number]
            for time, end in zip(reversed(segment.times), reversed(segment.ends), strict=True):
                left -= segment.depths[end] + _EACH
                if left < 0:
                    break
                now = min(now, self._began + time * _TICK)
                requests.append((now, segment.path(end)))
        return requests[::-1]

    def _begin(self) -> None:
        self._segment, self._stored, self._offered = _Segment(self._segment.number + 1), 0, 0

    def _changed(self) -> _Changed | None:
        segment, requests = self._segment, len(self._segment.ends)
        self._offered = len(segment.keys)
        current = _Packed(self._places[self._turn], *segment.packed()) if requests > self._stored else None
        if not (current or self._full or self._removal):
            return None
        return _Changed(self._removal, self._full, current, segment, requests)

    def _write(self, changed: _Changed) -> None:
        if changed.removal:
            changed.removal()
        seal = self._codec.keyed_seal
        for place, columns, keys in filter(None, (changed.full, changed.current)):
            self._put(place, columns + b"".join(seal.names(keys) if seal else keys), self._length)

    def _written(self, changed: _Changed) -> None:
        if self._removal is changed.removal:
            self._removal, self.erasing = None, False
        if self._full is changed.full:
            self._full = None
        if changed.current:
            self._turn = 1 - self._turn
        if self._segment is changed.segment:
            self._stored = changed.requests


def _admit(index: CacheIndex, frames: Iterable[tuple[ChunkKey, int]]) -> None:
    """Admit frames that no request names, with their bytes, the oldest first; those of one length in one call."""
    for nbytes, alike in itertools.groupby(frames, lambda frame: frame[1]):
        newest_first = [key for key, _ in alike][::-1]  # `admit` tells the policy of the last key first
        index.admit(newest_first, [None] * len(newest_first), nbytes)
