"""The frame's format: its bytes are pinned, and every frame that is not the one asked for is told apart."""

from __future__ import annotations

import hashlib
import random
import struct
import zlib

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier_core.frames.format import (
    FrameError,
    header_of,
    inspect,
    payload_of,
    read_header,
    seal,
    seal_part,
    shard_checksums_of,
    verify,
)
from kvtier_core.frames.identity import RAW, CodecIdentity, lossy
from kvtier_core.types import FRAME_ALIGNMENT, Namespace
from kvtier_testing.samples import make_layout

NAMESPACE = Namespace.of({"model": "golden", "block": 16})
KEY = bytes(range(32))
PAYLOAD = b"kv" * 50
CODEC = CodecIdentity("zip", hashlib.sha256(b"options").digest(), lossless=True)

#: By hand, from struct and zlib. It changes only with the format version.
GOLDEN = (
    "6b76746965720d0a"  # magic
    "0200"  # format version
    "0100"  # flags: lossless
    "6400000000000000"  # payload bytes
    "529ad0bb679655765f1c167f8aae32926e01a523eb153bc4e70003b143cbf9d1"  # namespace
    "000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f"  # key
    "726177"
    + 61 * "00"  # codec: raw
    + 32 * "00"  # digest of its options
    + "b96faf11"  # checksum of the stored payload
    "b96faf11"  # checksum of the decoded payload
    "cd0f569c"  # checksum of all before
)
HEADER_NBYTES = len(GOLDEN) // 2
CHECKSUM_AT = HEADER_NBYTES - 4
LENGTH_AT = 12
FLAGS_AT = 10


def sealed(payload=PAYLOAD, codec=RAW, spare=0, decoded=None):
    """A frame with ``spare`` bytes behind its payload. The header's 4 KiB were full of rubbish before."""
    view = memoryview(bytearray(b"\xa5" * FRAME_ALIGNMENT + payload + b"\xa5" * spare))
    seal(view, NAMESPACE, KEY, len(payload), codec=codec, decoded_checksum=decoded)
    return view


def check(view, **asked):
    asked = {"namespace": NAMESPACE, "key": KEY, "payload_nbytes": len(PAYLOAD), **asked}
    return verify(view, asked.pop("namespace"), asked.pop("key"), **asked)


def looked_at(view):
    """What `inspect` says of it."""
    return inspect(len(view), lambda at, nbytes: bytes(view[at : at + nbytes]))


def flipped(view, place, bit=0):
    view[place] ^= 1 << bit
    return view


def resealed(view):
    """With a checksum that fits the header again."""
    struct.pack_into("<I", view, CHECKSUM_AT, zlib.crc32(view[:CHECKSUM_AT]))
    return view


def test_the_header_has_these_very_bytes():
    assert bytes(sealed()[:HEADER_NBYTES]).hex() == GOLDEN


def test_sealing_fills_the_header_and_touches_nothing_else():
    view = sealed(spare=10)
    assert bytes(view[HEADER_NBYTES:FRAME_ALIGNMENT]) == bytes(FRAME_ALIGNMENT - HEADER_NBYTES)
    assert bytes(view[FRAME_ALIGNMENT:]) == PAYLOAD + b"\xa5" * 10


def test_a_checksum_that_is_known_is_not_computed_again(monkeypatch):
    """The payload of a raw frame was read once, by the worker that copied it."""
    read = []
    monkeypatch.setattr("kvtier_core.frames.format.crc32", lambda data: read.append(len(data)) or zlib.crc32(data))
    view = memoryview(bytearray(FRAME_ALIGNMENT) + PAYLOAD)
    seal(view, NAMESPACE, KEY, len(PAYLOAD), payload_checksum=zlib.crc32(PAYLOAD))
    assert read == [CHECKSUM_AT]
    assert check(view) is None


def test_a_whole_frame_is_whole():
    assert check(sealed()) is None
    assert check(sealed(spare=4096)) is None
    assert check(sealed(b""), payload_nbytes=0) is None
    assert looked_at(sealed()) == read_header(sealed())


def test_a_frame_without_a_whole_header_is_short():
    assert check(memoryview(b"")) is FrameError.SHORT
    assert check(sealed()[: FRAME_ALIGNMENT - 1]) is FrameError.SHORT


ERRORS = [
    (FrameError.SHORT, lambda: sealed()[:-1], {}),
    (FrameError.MAGIC, lambda: flipped(sealed(), 0), {}),
    (FrameError.VERSION, lambda: flipped(sealed(), 8), {}),
    (FrameError.VERSION, lambda: resealed(flipped(sealed(), FLAGS_AT, 4)), {}),
    (FrameError.VERSION, lambda: resealed(flipped(flipped(sealed(), FLAGS_AT, 3), FLAGS_AT, 1)), {}),
    (FrameError.SEAL, lambda: resealed(flipped(sealed(), FLAGS_AT, 1)), {}),
    (FrameError.SEAL, lambda: resealed(flipped(sealed(), FLAGS_AT, 2)), {}),
    (FrameError.HEADER, lambda: flipped(sealed(), LENGTH_AT), {}),
    (FrameError.HEADER, lambda: resealed(flipped(sealed(), FLAGS_AT, 3)), {}),
    (FrameError.CODEC, lambda: sealed(codec=CODEC), {}),
    (FrameError.CODEC, lambda: sealed(codec=lossy(RAW)), {}),
    (FrameError.LENGTH, sealed, {"payload_nbytes": len(PAYLOAD) + 1}),
    (FrameError.NAMESPACE, sealed, {"namespace": Namespace.of({"model": "golden", "block": 32})}),
    (FrameError.KEY, sealed, {"key": bytes(32)}),
    (FrameError.CHECKSUM, lambda: flipped(sealed(), FRAME_ALIGNMENT), {}),
    (FrameError.CHECKSUM, lambda: flipped(sealed(codec=CODEC), FRAME_ALIGNMENT), {"codec": CODEC}),
    (FrameError.CHECKSUM, lambda: sealed(decoded=0), {}),
]


@pytest.mark.parametrize(("error", "spoil", "asked"), ERRORS, ids=lambda part: getattr(part, "name", None))
def test_each_error_has_its_name(error, spoil, asked):
    assert check(spoil(), **asked) is error


def test_every_error_was_seen():
    """The others are found where frames are opened, decoded and rearranged, and where shards are read alone."""
    seen = {error for error, _, _ in ERRORS}
    elsewhere = {FrameError.FORGED, FrameError.UNDECODABLE, FrameError.DECODED, FrameError.SHARDS, FrameError.RANKS}
    assert seen | elsewhere == set(FrameError)


def test_a_frame_of_version_1_is_incompatible():
    """With the header of before, byte by byte. Its checksum covered header and payload."""
    fields = struct.pack("<8sHHQ32s32s", b"kvtier\r\n", 1, 0, len(PAYLOAD), NAMESPACE.digest, KEY)
    header = fields + struct.pack("<I", zlib.crc32(PAYLOAD, zlib.crc32(fields)))
    view = memoryview(header.ljust(FRAME_ALIGNMENT, b"\0") + PAYLOAD)
    assert check(view) is FrameError.VERSION
    assert looked_at(view) is FrameError.VERSION
    assert FrameError.VERSION.incompatible


def test_a_damaged_frame_is_not_called_incompatible():
    """Nor the other way round: what is incompatible is never deleted, and what is damaged is."""
    incompatible = {error.name for error in FrameError if error.incompatible}
    assert incompatible == {"VERSION", "SEAL", "CODEC", "SHARDS", "RANKS", "UNDECODABLE", "DECODED"}
    for place in range(FLAGS_AT, HEADER_NBYTES):
        assert check(flipped(sealed(), place)) is FrameError.HEADER


@pytest.mark.parametrize("nbytes", [1 << 50, (1 << 64) - 1])
def test_a_header_that_claims_petabytes_is_refused(nbytes):
    """Even with checksums that fit: the length is judged before a byte of the payload is read."""
    view = sealed()
    struct.pack_into("<Q", view, LENGTH_AT, nbytes)
    resealed(view)
    assert check(view) is FrameError.LENGTH
    assert check(view, payload_nbytes=None) is FrameError.SHORT
    assert looked_at(view) is FrameError.SHORT


@pytest.mark.parametrize("codec", [RAW, CODEC], ids=str)
@given(st.binary(min_size=1, max_size=200), st.data())
def test_one_flipped_bit_is_seen(codec, payload, data):
    place = data.draw(st.integers(0, HEADER_NBYTES + len(payload) - 1))
    place += (FRAME_ALIGNMENT - HEADER_NBYTES) * (place >= HEADER_NBYTES)
    view = flipped(sealed(payload, codec, spare=20), place, data.draw(st.integers(0, 7)))
    assert check(view, codec=codec, payload_nbytes=len(payload) if codec == RAW else None) is not None


OTHERS = [
    RAW,
    lossy(RAW),
    attrs.evolve(CODEC, type="zap"),
    attrs.evolve(CODEC, digest=bytes(32)),
    attrs.evolve(CODEC, lossless=False),
]


@pytest.mark.parametrize("other", OTHERS, ids=str)
def test_a_codec_reads_its_own_frames_only(other):
    """Type, options, and whether it is lossless: each of them tells two codecs apart."""
    assert check(sealed(codec=CODEC), codec=CODEC) is None
    assert check(sealed(codec=CODEC), codec=other) is FrameError.CODEC
    assert check(sealed(codec=other), codec=CODEC) is FrameError.CODEC
    assert looked_at(sealed(codec=other)).codec == other


def test_the_lengths_of_a_codec_vary():
    for nbytes in (0, 1, 300):
        assert check(sealed(bytes(nbytes), CODEC), codec=CODEC, payload_nbytes=None) is None


def test_the_payload_is_a_view_of_what_was_sealed():
    view = sealed(spare=10)
    payload = payload_of(view)
    assert bytes(payload) == PAYLOAD
    payload[0] = 0
    assert view[FRAME_ALIGNMENT] == 0, "a copy"


# -- frames of several shards ------------------------------------------------------------------------------------

PART = make_layout((4096, 100), blocks=1, ranks=3).parts[0]
TABLE = slice(HEADER_NBYTES, HEADER_NBYTES + 2 + 3 * 4 + 4)


def of_shards(seed=0, checksums=()):
    view = memoryview(bytearray(b"\xa5" * FRAME_ALIGNMENT + random.Random(seed).randbytes(PART.payload_nbytes)))
    seal_part(view, NAMESPACE, KEY, PART, checksums)
    return view


def check_shards(view):
    return check(view, payload_nbytes=PART.payload_nbytes)


def test_each_shard_has_its_checksum():
    view = of_shards()
    expected = [zlib.crc32(view[shard.offset :][: shard.nbytes]) for shard in PART.shards]
    assert list(shard_checksums_of(view)) == expected and len(expected) == 3
    assert check_shards(view) is None and looked_at(view) == read_header(view)
    assert bytes(of_shards(checksums=expected)) == bytes(view), "those that ranks computed are taken"
    assert header_of(view).payload_checksum == zlib.crc32(payload_of(view))


def test_where_there_is_one_shard_the_payload_has_the_only_checksum():
    view, (part,) = sealed(), make_layout((len(PAYLOAD),), blocks=1).parts
    seal_part(view, NAMESPACE, KEY, part)
    assert bytes(view) == bytes(sealed())
    assert shard_checksums_of(view) == ()


@pytest.mark.parametrize("place", range(TABLE.start, TABLE.stop))
def test_a_damaged_checksum_of_a_shard_is_found_by_every_reader(place):
    for bit in range(8):
        view = flipped(of_shards(), place, bit)
        assert check_shards(view) is looked_at(view) is FrameError.HEADER


def test_the_checksums_of_another_frame_do_not_fit():
    """As if a drive had written the one half of a header, and of the other one only what was there before."""
    view, other = of_shards(), of_shards(seed=1)
    view[TABLE] = other[TABLE]
    assert check_shards(view) is FrameError.HEADER
