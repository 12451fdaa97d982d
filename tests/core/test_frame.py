"""The one shape of a chunk at rest: its bytes are pinned, and whatever is not it is told apart."""

from __future__ import annotations

import struct
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier_core.frames import format as frame
from kvtier_core.frames.format import Damage
from kvtier_core.types import FRAME_ALIGNMENT, Namespace

NAMESPACE = Namespace.of({"model": "golden", "block": 16})
KEY = bytes(range(32))
PAYLOAD = b"kv" * 50
CODEC = 7

#: By hand, from struct and zlib. It changes only with the format version.
GOLDEN = (
    "6b76746965720d0a"  # magic
    "0100"  # format version
    "0000"  # codec: raw
    "6400000000000000"  # payload bytes
    "529ad0bb679655765f1c167f8aae32926e01a523eb153bc4e70003b143cbf9d1"  # namespace
    "000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f"  # key
    "896411f3"  # checksum
)
HEADER_NBYTES = len(GOLDEN) // 2
LENGTH_AT = 12


def sealed(payload=PAYLOAD, codec=frame.RAW, spare=0):
    """A frame with ``spare`` bytes behind its payload. The header page was full of rubbish before."""
    view = memoryview(bytearray(b"\xa5" * FRAME_ALIGNMENT + payload + b"\xa5" * spare))
    frame.seal(view, NAMESPACE, KEY, len(payload), codec)
    return view


def check(view, **asked):
    asked = {"namespace": NAMESPACE, "key": KEY, "payload_nbytes": len(PAYLOAD), **asked}
    return frame.check(view, asked.pop("namespace"), asked.pop("key"), **asked)


def flipped(view, place, bit=0):
    view[place] ^= 1 << bit
    return view


def test_the_header_has_these_very_bytes():
    assert bytes(sealed()[:HEADER_NBYTES]).hex() == GOLDEN


def test_sealing_fills_the_header_page_and_touches_nothing_else():
    view = sealed(spare=10)
    assert bytes(view[HEADER_NBYTES:FRAME_ALIGNMENT]) == bytes(FRAME_ALIGNMENT - HEADER_NBYTES)
    assert bytes(view[FRAME_ALIGNMENT:]) == PAYLOAD + b"\xa5" * 10


def test_a_whole_frame_is_whole():
    assert check(sealed()) is None
    assert check(sealed(spare=4096)) is None
    assert check(sealed(b""), payload_nbytes=0) is None


def test_a_frame_without_a_header_page_is_short():
    assert check(memoryview(b"")) is Damage.SHORT
    assert check(sealed()[: FRAME_ALIGNMENT - 1]) is Damage.SHORT


DAMAGES = [
    (Damage.SHORT, lambda: sealed()[:-1], {}),
    (Damage.MAGIC, lambda: flipped(sealed(), 0), {}),
    (Damage.VERSION, lambda: flipped(sealed(), 8), {}),
    (Damage.CODEC, lambda: sealed(codec=CODEC), {}),
    (Damage.LENGTH, sealed, {"payload_nbytes": len(PAYLOAD) + 1}),
    (Damage.NAMESPACE, sealed, {"namespace": Namespace.of({"model": "golden", "block": 32})}),
    (Damage.KEY, sealed, {"key": bytes(32)}),
    (Damage.CHECKSUM, lambda: flipped(sealed(), FRAME_ALIGNMENT), {}),
]


@pytest.mark.parametrize(("damage", "spoil", "asked"), DAMAGES, ids=lambda part: getattr(part, "name", None))
def test_each_damage_has_its_name(damage, spoil, asked):
    assert check(spoil(), **asked) is damage


def test_every_damage_was_seen():
    assert {damage for damage, _, _ in DAMAGES} == set(Damage)


@pytest.mark.parametrize("nbytes", [1 << 50, (1 << 64) - 1])
def test_a_header_that_claims_petabytes_is_refused(nbytes):
    """Even with a checksum that fits the header: the length is judged before a byte is read."""
    view = sealed()
    struct.pack_into("<Q", view, LENGTH_AT, nbytes)
    struct.pack_into("<I", view, HEADER_NBYTES - 4, zlib.crc32(PAYLOAD, zlib.crc32(view[: HEADER_NBYTES - 4])))
    assert check(view) is Damage.LENGTH
    assert check(view, payload_nbytes=None) is Damage.SHORT


@pytest.mark.parametrize("codec", [frame.RAW, CODEC])
@given(st.binary(min_size=1, max_size=200), st.data())
def test_one_flipped_bit_is_seen(codec, payload, data):
    place = data.draw(st.integers(0, HEADER_NBYTES + len(payload) - 1))
    place += (FRAME_ALIGNMENT - HEADER_NBYTES) * (place >= HEADER_NBYTES)
    view = flipped(sealed(payload, codec, spare=20), place, data.draw(st.integers(0, 7)))
    assert check(view, codec=codec, payload_nbytes=len(payload) if codec == frame.RAW else None) is not None


def test_a_frame_of_a_codec_is_not_a_raw_one():
    assert check(sealed(codec=CODEC), codec=CODEC) is None
    assert check(sealed(codec=CODEC), codec=CODEC + 1) is Damage.CODEC
    assert check(sealed(), codec=CODEC) is Damage.CODEC


def test_the_lengths_of_a_codec_vary():
    for nbytes in (0, 1, 300):
        assert check(sealed(bytes(nbytes), CODEC), codec=CODEC, payload_nbytes=None) is None


def test_the_payload_is_a_view_of_what_was_sealed():
    view = sealed(spare=10)
    payload = frame.payload_of(view)
    assert bytes(payload) == PAYLOAD
    payload[0] = 0
    assert view[FRAME_ALIGNMENT] == 0, "a copy"
