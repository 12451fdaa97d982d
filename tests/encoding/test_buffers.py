"""Memory for sealed and encoded frames: used again, and never while somebody may read it."""

from __future__ import annotations

import mmap

import pytest
from machine import LAYOUT, Shelf
from sealing import AES, KEYS, MAC, codec_of, sealed
from serializing import XorConfig

from kvtier_core.errors import BackendError
from kvtier_core.stack.store_tier.reads import read_frames
from kvtier_core.stack.store_tier.writes import FrameWrite, write_frames
from kvtier_core.types import FRAME_ALIGNMENT, ReadStatus

POISON = 0xA5


@pytest.fixture
def made(monkeypatch):
    """Every buffer that is made, by its number; none is empty."""
    numbers, plain = [], mmap.mmap

    def make(fd, nbytes):
        numbers.append(len(numbers))
        memory = plain(fd, nbytes)
        memory[:] = bytes([POISON]) * nbytes
        return memory

    monkeypatch.setattr("kvtier_core.work.buffers.mmap.mmap", make)
    return numbers


@pytest.fixture(params=[MAC, AES, None], ids=["mac", "aes", "serializer alone"])
def codec(request, made):
    return codec_of(request.param, None if request.param else XorConfig())


class Breaking(Shelf):
    """Fails as a whole, or for one key."""

    def __init__(self, failure):
        super().__init__()
        self.failure = failure

    def write(self, keys, frames):
        super().write(keys, frames)
        if self.failure == "raises":
            raise BackendError("broken")
        return [BackendError("one is broken"), *[None] * (len(keys) - 1)]


class Keeping(Shelf):
    """Breaks the interface: it keeps views, as whoever reads them later does."""

    def __init__(self):
        super().__init__()
        self.kept = []

    def write(self, keys, frames):
        self.kept += [frame[FRAME_ALIGNMENT:] for frame in frames]
        return super().write(keys, frames)


def written(codec, backend, keys=KEYS):
    return write_frames(backend, codec, [FrameWrite(key, None, sealed(key)) for key in keys])


def test_there_are_as_many_buffers_as_frames_under_way(codec, made):
    for _ in range(5):
        written(codec, Shelf())
    assert len(made) == len(KEYS)
    under_way = [codec.encode(key, sealed(key)) for key in KEYS]
    written(codec, Shelf())
    assert len(made) == 2 * len(KEYS)
    contents = {key: bytes(frame) for key, frame in zip(KEYS, under_way, strict=True)}
    written(codec, Shelf())
    assert {key: bytes(frame) for key, frame in zip(KEYS, under_way, strict=True)} == contents, "overwritten"


@pytest.mark.parametrize("failure", ["raises", "returns"])
def test_a_buffer_of_a_write_that_failed_is_not_used_again(codec, made, failure):
    if failure == "raises":
        with pytest.raises(BackendError):
            written(codec, Breaking(failure))
    else:
        assert isinstance(written(codec, Breaking(failure))[0], BackendError)
    written(codec, Shelf())
    assert len(made) == 2 * len(KEYS)


def test_a_buffer_of_which_a_view_was_kept_is_not_used_again(codec, made):
    keeping = Keeping()
    written(codec, keeping)
    kept = [bytes(view) for view in keeping.kept]
    written(codec, Shelf())
    assert len(made) == 2 * len(KEYS)
    assert [bytes(view) for view in keeping.kept] == kept
    keeping.kept.clear()
    written(codec, Shelf())
    assert len(made) == 2 * len(KEYS)


def test_earlier_bytes_of_a_buffer_are_not_stored(codec):
    shelf = Shelf()
    written(codec, shelf)
    for frame in shelf.frames.values():
        header, padding = frame[:FRAME_ALIGNMENT], frame[FRAME_ALIGNMENT + LAYOUT.payload_nbytes :]
        assert len(frame) == LAYOUT.frame_nbytes and padding
        assert not any(padding) and not any(header[256:])


def test_frames_are_read_into_the_same_buffers_again_and_a_kept_one_is_not_used(made):
    codec, backend = codec_of(None, XorConfig()), Shelf()
    written(codec, backend)
    before = len(made)
    slots = [memoryview(bytearray(LAYOUT.frame_nbytes)) for _ in KEYS]
    for _ in range(3):
        reads = read_frames(backend, codec, list(zip(KEYS, slots, strict=True)), {})
        assert {each.status for each in reads} == {ReadStatus.VERIFIED}
        assert all(slot == sealed(key) for key, slot in zip(KEYS, slots, strict=True))
    assert len(made) == max(before, len(KEYS)), "each read made new ones"
    kept = []
    plain = backend.read
    backend.read = lambda keys, into: kept.extend(into) or plain(keys, into)
    for _ in range(2):
        read_frames(backend, codec, list(zip(KEYS, slots, strict=True)), {})
    assert len({id(view.obj) for view in kept}) == 2 * len(KEYS), "somebody may still write to it"
    assert {type(view.obj).__name__ for view in kept} == {"mmap"}, "these are no buffers"


def test_a_slot_of_an_arena_is_no_codecs_buffer(made):
    written(codec_of(None), Shelf())
    assert made == []
