"""The laws of a backend whose frames workers read by themselves, and of its reader."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import attrs
import pytest

from kvtier_core.errors import BackendError
from kvtier_core.frames.format import seal_part
from kvtier_core.interfaces import Backend, DirectLoad, DirectReader, SupportsDirectReads
from kvtier_core.types import FRAME_HEADER_NBYTES, ChunkKey, Namespace, ReadStatus, StoredFrame
from kvtier_testing.laws.attached import shard_of
from kvtier_testing.laws.backend_calls import BackendCallLaws
from kvtier_testing.resources import PATIENCE
from kvtier_testing.samples import PagedBuffer, make_keys, make_namespace


@attrs.frozen
class _Worker:
    """A reader, and the pages that it fills: chunk after chunk in blocks side by side."""

    store: SupportsDirectReads
    reader: DirectReader
    pages: PagedBuffer
    blocks: int  #: of a chunk

    def frames(
        self, keys: Sequence[ChunkKey], named: Sequence[ChunkKey] = (), namespace: Namespace | None = None
    ) -> list[StoredFrame]:
        """The frames of these keys as a plan names them, or as those of other keys."""
        digest = (namespace or make_namespace()).digest
        located = self.store.locate(keys)
        assert None not in located, "locate() does not know a frame that was written"
        pairs = zip(located, named or keys, strict=True)
        return [StoredFrame("tier", location, key, digest) for location, key in pairs if location]

    def load(self, frames: Sequence[StoredFrame]) -> DirectLoad:
        """Load frames, and wait for the end."""
        self.reader.load(1, frames, [[self.chunk(place)] for place in range(len(frames))])
        self.reader.wait([1], PATIENCE)
        ended = list(self.reader.finished())
        assert [each.job for each in ended] == [1], f"a job was begun and waited for; finished() reports {ended}"
        return ended[0]

    def chunk(self, place: int) -> list[int]:
        """The blocks of a chunk."""
        return list(range(place * self.blocks, (place + 1) * self.blocks))


def _can_be_sent(value: object) -> bool:
    """May a `Location` have this value? A server sends it to engines."""
    return type(value) in (str, bytes) or (type(value) is int and -(1 << 63) <= value < 1 << 64)


class DirectReadLaws(BackendCallLaws):
    """Skipped where frames pass through the slots of an arena."""

    def test_workers_read_a_frame_by_themselves(self, tmp_path: Path) -> None:
        """A reader loads the frame that `locate` found until its key is deleted or written again; an absent key has no
        location.

        Otherwise workers would read something else. Checksums find that: the request would wait for the load, and then
        be computed.
        """
        kept, gone, new = (make_keys(9)[i : i + 3] for i in (0, 3, 6))
        with self.opened(tmp_path) as backend, self._worker(tmp_path, backend) as worker:
            backend.write([*kept, *gone], [self._sealed(key) for key in (*kept, *gone)])
            where = worker.frames(kept)
            for frame in where:
                assert all(map(_can_be_sent, frame.location.place)), (
                    f"a location has numbers of 64 bits, text and bytes, and locate() says {frame.location.place}"
                )
            backend.delete(gone)
            backend.write(new, [self._sealed(key) for key in new])
            assert list(worker.store.locate(gone)) == [None] * len(gone), "a frame that was deleted is located"
            load = worker.load([*where, *worker.frames(new)])
            assert load == DirectLoad(1, True, {}), f"frames that are stored were not loaded: {load}"
            (shard,) = self.layout.parts[0].shards
            for place, key in enumerate((*kept, *new)):
                payload = self._sealed(key)[FRAME_HEADER_NBYTES:][: self.layout.payload_nbytes]
                assert shard_of(worker.pages, shard, [worker.chunk(place)]) == payload, (
                    "the pages have other bytes than the frame that was located there, which is still stored"
                )

    def test_a_reader_brings_nothing_that_is_not_the_frame(self, tmp_path: Path) -> None:
        """A frame of another key or namespace, or a damaged one, fails its load with a reason, and touches no page.

        Otherwise a request would go on with the KV of another prompt: fluent, wrong answers.
        """
        first, second = make_keys(2)
        with self.opened(tmp_path) as backend, self._worker(tmp_path, backend) as worker:
            backend.write([first, second], [self._sealed(first), self._sealed(second)])
            before = worker.pages.everything()
            named = {
                "another key": (second, worker.frames([first], named=[second])),
                "another namespace": (first, worker.frames([first], namespace=make_namespace("another"))),
            }
            if self.spoil(tmp_path, first):
                named["damage"] = (first, worker.frames([first]))
            for what, (key, frames) in named.items():
                load = worker.load(frames)
                assert not load.ok and load.unread[key].status is not ReadStatus.VERIFIED, (
                    f"a frame of {what} was loaded, or no reason is given why not"
                )
                unchanged = worker.pages.everything() == before  # pytest would explain a difference byte by byte
                assert unchanged, f"a frame of {what} reached the pages"

    def _sealed(self, key: ChunkKey) -> memoryview:
        """A frame whose payload is a chunk of the layout."""
        frame = self.frame(key)
        seal_part(frame, make_namespace(), key, self.layout.parts[0])
        return frame

    @contextlib.contextmanager
    def _worker(self, folder: Path, backend: Backend) -> Iterator[_Worker]:
        if not isinstance(backend, SupportsDirectReads) or not (handle := backend.reader_handle()):
            pytest.skip("frames of this store pass through the slots of an arena")
        (blocks,) = self.layout.parts[0].blocks
        pages = PagedBuffer(self.layout, 6 * blocks, random.Random(0))
        try:
            reader = self.config(folder).attach_reader(handle, pages.kv_cache(), PATIENCE)
        except BackendError as error:
            pytest.skip(f"workers do not read it here: {error}")
        with contextlib.closing(reader):
            yield _Worker(backend, reader, pages, blocks)
