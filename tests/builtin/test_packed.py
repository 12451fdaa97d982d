"""The packed codec: every bit comes back, each way of computing it gives the same bytes, and no input does harm."""

from __future__ import annotations

import random
import struct
import zlib
from functools import partial

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st
from machine import open_codec
from packed_kv import HEAD_NBYTES, HEADER, KV, RAW, TILE, bfloat16, values
from serving import Serving
from sizes import LONG

from kvtier_core import native
from kvtier_core.builtin import packed
from kvtier_core.builtin.packed import PackedConfig
from kvtier_core.errors import BackendError
from kvtier_core.frames.format import payload_of, seal
from kvtier_core.interfaces import OpenContext
from kvtier_core.transfer.packing import bound, plain_pack, plain_unpack
from kvtier_core.types import FRAME_HEADER_NBYTES, Nbytes
from kvtier_testing import SerializerLaws
from kvtier_testing.samples import Poisoned, make_context, make_key, make_layout


@attrs.frozen
class Method:
    name: str
    pack: object
    unpack: object

    def encoded(self, payload):
        into = Poisoned(bound(len(payload)))
        nbytes = self.pack(memoryview(payload), into.view)
        assert into.untouched_beyond(nbytes)
        return bytes(into.view[:nbytes])

    def decoded(self, encoded, nbytes):
        """The payload, or None."""
        into = Poisoned(nbytes)
        found = self.unpack(memoryview(encoded), into.view)
        assert into.untouched_beyond(nbytes)
        return bytes(into.view) if found else None


def native_methods():
    for number, name in enumerate(native.extension.packed_methods()):
        yield Method(
            name, partial(native.extension.pack, method=number), partial(native.extension.unpack, method=number)
        )


PLAIN = Method("python", plain_pack, plain_unpack)
METHODS = [PLAIN, *native_methods()]
each_method = pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)


def everywhere(payload):
    """The one encoding that all methods give, which all decode."""
    (encoded,) = {method.encoded(payload) for method in METHODS}
    assert {method.decoded(encoded, len(payload)) for method in METHODS} == {bytes(payload)}
    return encoded


def heads(encoded):
    tiles = -(-(HEADER.unpack_from(encoded)[1] // 256 * 256) // TILE)
    return [encoded[HEADER.size + i * HEAD_NBYTES :][:HEAD_NBYTES] for i in range(tiles)]


class TestPackedLaws(SerializerLaws):
    def config(self, folder):
        return PackedConfig()

    def payloads(self):
        yield from super().payloads()
        yield KV[: self.layout.payload_nbytes]


# -- every bit comes back ------------------------------------------------------------------------------


def test_every_value_comes_back_from_a_packed_tile():
    """Each exponent as the highest of its tile, below it all that a code reaches, and zeros."""
    for exponent in range(256):
        lower = range(max(0, exponent - 15), exponent)
        tile = [sign << 15 | exponent << 7 | mantissa for sign in (0, 1) for mantissa in range(128)]
        tile += [(i % 2) << 15 | each << 7 | i for i, each in enumerate(lower)]
        encoded = everywhere(values(*tile, *([tile[0]] * (2048 - len(tile)))))
        assert len(encoded) == 128 + TILE * 3 // 4


@pytest.mark.parametrize("seed", [None, 0])
def test_all_values_at_once_come_back(seed):
    numbers = list(range(65536))
    if seed is not None:
        random.Random(seed).shuffle(numbers)
    everywhere(values(*numbers))


def test_values_like_those_of_kv_take_three_quarters():
    assert len(everywhere(KV)) < len(KV) * 0.765


def test_random_bytes_are_kept_as_they_are():
    noise = random.Random(0).randbytes(10 * TILE)
    encoded = everywhere(noise)
    assert len(encoded) <= len(noise) * 1.01
    bodies = HEADER.size + 10 * HEAD_NBYTES
    assert all(noise[at : at + 3072] == encoded[bodies + at * 3 // 4 :][:3072] for at in range(0, len(noise), TILE))


@pytest.mark.parametrize("zeros", [1, 9, 10, 1024, 2047, 2048])
def test_zeros_cost_nothing(zeros):
    """Of tokens or channels that are padding."""
    tile = [0] * zeros + [bfloat16(1.0)] * (2048 - zeros)
    random.Random(zeros).shuffle(tile)
    assert len(everywhere(values(*tile))) == 128 + TILE * 3 // 4


@pytest.mark.parametrize(("escapes", "body"), [(0, 3072), (1, 3072), (9, 3072), (10, 4096), (2000, 4096)])
def test_nine_escapes_fit_a_tile(escapes, body):
    """In any places; the rest is within reach of one base."""
    rng = random.Random(escapes)
    far = [rng.choice((bfloat16(1e-9), bfloat16(-1e-20))) for _ in range(escapes)]
    tile = far + [bfloat16(rng.uniform(1, 2)) for _ in range(2048 - escapes)]
    rng.shuffle(tile)
    encoded = everywhere(values(*tile))
    assert len(encoded) == 128 + body
    assert heads(encoded)[0][2] == (escapes if body < TILE else RAW)


def test_a_tile_does_not_suffer_for_another():
    encoded = everywhere(KV[:TILE] + random.Random(0).randbytes(TILE) + KV[TILE : 2 * TILE])
    assert [head[2] == RAW for head in heads(encoded)] == [False, True, False]


def test_every_length_comes_back():
    for nbytes in (*range(0, 600), *range(TILE - 2, TILE + 3), *range(2 * TILE + 254, 2 * TILE + 260)):
        everywhere(KV[:nbytes])


@given(st.binary(max_size=1200))
def test_any_bytes_come_back(payload):
    everywhere(payload)


@given(
    st.integers(0, 3 * 2048),
    st.integers(0, 250),
    st.lists(st.tuples(st.integers(0, 1 << 20), st.integers(0, 65535)), max_size=30),
)
def test_any_values_among_kv_come_back(count, odd, others):
    payload = bytearray(KV[: 2 * count] + bytes(odd))
    for place, value in others:
        if count:
            struct.pack_into("<H", payload, place % count * 2, value)
    everywhere(payload)


@pytest.mark.parametrize("skew", [0, 1, 16, 63])
def test_large_payloads_may_have_any_alignment(skew):
    """They go past the caches where they are aligned."""
    payload = memoryview(bytearray(skew) + KV * 100)[skew:]
    assert len(payload) > 4 << 20
    encodings = []
    for method in native_methods():
        into = Poisoned(bound(len(payload)), offset=64 + skew)
        nbytes = method.pack(payload, into.view)
        assert into.untouched_beyond(nbytes)
        encodings.append(bytes(into.view[:nbytes]))
        back = Poisoned(len(payload), offset=64 + skew)
        assert method.unpack(into.view[:nbytes], back.view) and back.view == payload
        assert back.untouched_beyond(len(payload))
    assert encodings == [PLAIN.encoded(payload)] * len(encodings)


# -- the format ----------------------------------------------------------------------------------------


def by_hand():
    """128 values of 1.0, but for one of 0.5, a zero and three bytes behind: as csrc/packed.h has it."""
    payload = [0x3F80] * 128
    payload[1], payload[100] = 0x3F00, 0x8000
    header = b"kvp\2" + bytes(4) + struct.pack("<Q", 259) + bytes(48)
    head = bytes([127 - 15, 127 - 15, 1]) + struct.pack("<HB", 100, 0)
    rests = bytearray(128)
    rests[100] = 1
    codes = bytearray(b"\xff" * 64)
    codes[1], codes[100 - 64] = 0xFE, 0x0F
    return values(*payload) + b"end", header + head.ljust(64, b"\0") + rests + codes + b"end"


def test_the_format_is_the_one_in_the_document():
    payload, encoded = by_hand()
    assert everywhere(payload) == encoded


def test_the_format_is_that_of_every_release():
    """Else frames that an older one wrote would be damaged: raise the format version, here and in the header."""
    assert PackedConfig.format_version == 2
    assert zlib.crc32(everywhere(KV)) == 1613584168


# -- harmed input --------------------------------------------------------------------------------------


@each_method
@pytest.mark.parametrize(
    "harmed",
    [
        lambda good: b"",
        lambda good: good[:63],
        lambda good: good[:-1],
        lambda good: good + b"\1",
        lambda good: good[: 64 + 64],
        lambda good: b"kvp\1" + good[4:],
        lambda good: good[:8] + struct.pack("<Q", 258) + good[16:],
        lambda good: good[:8] + struct.pack("<Q", 2**64 - 1) + good[16:],
        lambda good: good[:66] + bytes([RAW]) + good[67:],
        lambda good: good[:66] + bytes([RAW]) + bytes(4) + good[71:],
        lambda good: good[:66] + bytes([10]) + good[67:],
        lambda good: good[:66] + bytes([254]) + good[67:],
        lambda good: good[:67] + struct.pack("<H", 128) + good[69:],
        lambda good: good[:67] + struct.pack("<H", 65535) + good[69:],
    ],
)
def test_input_that_no_payload_encodes_to_is_refused(method, harmed):
    payload, good = by_hand()
    assert method.decoded(good, len(payload)) == payload
    assert method.decoded(harmed(good), len(payload)) is None


@each_method
@pytest.mark.parametrize("other", [0, 1, 258, 260, 515, TILE, 1 << 20])
def test_a_payload_of_another_length_is_refused(method, other):
    assert method.decoded(by_hand()[1], other) is None


@pytest.mark.parametrize("seed", range(LONG))
def test_all_methods_make_the_same_of_harmed_bytes(seed):
    rng = random.Random(seed)
    nbytes = 3 * TILE + 700
    good = PLAIN.encoded(KV[: 2 * TILE] + rng.randbytes(TILE) + KV[:700])
    for _ in range(200):
        harmed = bytearray(good)
        for _ in range(rng.choice((1, 1, 2, 50))):  # most of it in what decides
            harmed[rng.randrange(rng.choice((64 + 4 * HEAD_NBYTES, len(harmed))))] = rng.choice((0, 1, 9, 10, 255))
        if rng.random() < 0.3:
            del harmed[rng.randrange(len(harmed)) :]
        assert len({method.decoded(harmed, nbytes) for method in METHODS}) == 1


@given(st.binary(max_size=500), st.integers(0, 600))
def test_any_bytes_decode_to_nothing_or_to_as_much_as_asked(encoded, nbytes):
    assert len({method.decoded(encoded, nbytes) for method in METHODS}) == 1


@given(st.lists(st.binary(min_size=32, max_size=32), min_size=2, max_size=2), st.binary(max_size=900))
def test_any_heads_decode_to_nothing_or_to_as_much_as_asked(heads, rest):
    encoded = HEADER.pack(b"kvp\2\0\0\0\0", 516) + b"".join(heads) + rest
    assert len({method.decoded(encoded, 516) for method in METHODS}) == 1


@each_method
def test_a_payload_without_room_is_not_packed(method):
    """As many raw tiles have room as there is behind the bodies."""
    payload = KV[:TILE] + random.Random(0).randbytes(2 * TILE) + KV[TILE : 2 * TILE]
    needed = len(method.encoded(payload))
    for room in (0, 63, needed - 2049, needed - 1025, needed - 1):
        into = Poisoned(room)
        assert method.pack(memoryview(payload), into.view) == 0
        assert into.untouched_beyond(room)
    assert method.pack(memoryview(payload), memoryview(bytearray(needed + 5))) == needed


@each_method
def test_zeros_may_follow(method):
    """Where a shard has more room than it needs."""
    encoded = method.encoded(KV)
    assert method.decoded(encoded + bytes(5000), len(KV)) == KV
    assert method.decoded(encoded + bytes(5000) + b"\1", len(KV)) is None


def test_there_is_no_other_method():
    for call in (native.extension.pack, native.extension.unpack):
        with pytest.raises(ValueError, match="^no such method$"):
            call(b"", bytearray(1000), len(METHODS) - 1)


def test_a_damaged_encoding_is_the_stores_error():
    serializer = PackedConfig().open(make_context())
    with pytest.raises(BackendError, match=r"^packed: encoded data does not match a payload of 9 bytes$"):
        serializer.decode(memoryview(bytes(100)), memoryview(bytearray(9)))


# -- frames --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("writer", "reader"), [(PLAIN, METHODS[1]), (METHODS[1], PLAIN)], ids=["in C++", "in Python"])
def test_a_frame_is_read_with_and_without_the_extension(monkeypatch, writer, reader):
    layout = make_layout((len(KV),), blocks=1)
    context = OpenContext(make_context().namespace, layout, Nbytes(1 << 20))
    slot = memoryview(bytearray(layout.frame_nbytes))
    slot[FRAME_HEADER_NBYTES : FRAME_HEADER_NBYTES + len(KV)] = KV
    seal(slot, context.namespace, make_key(0), len(KV))
    monkeypatch.setattr(packed, "pack", writer.pack)
    monkeypatch.setattr(packed, "unpack", reader.unpack)
    codec = open_codec(PackedConfig(), context)
    stored = codec.encode(make_key(0), slot)
    assert len(stored) < len(slot) * 0.8
    back = memoryview(bytearray(layout.frame_nbytes))
    assert codec.decode_verified(make_key(0), memoryview(bytes(stored)), len(stored), back) is None
    assert payload_of(back) == KV


STACK = """\
version: 1
tiers:
  - {{type: heap, capacity: 1MiB}}
  - {{type: disk, path: "{path}", capacity: 1MiB, min_free: 0B, serializer: {serializer}}}
"""


def test_a_disk_tier_packs_what_it_stores(tmp_path):
    """And serves it in the next process, from a YAML file as users write it."""
    file, path = tmp_path / "kvtier.yaml", [make_key(number) for number in range(4)]
    file.write_text(STACK.format(path=tmp_path / "disk", serializer="packed"))
    with Serving(file) as serving:
        assert serving.ask(path) == 0
    with Serving(file) as serving:
        assert serving.ask(path) == len(path)
    file.write_text(STACK.format(path=tmp_path / "disk", serializer="raw"))
    with Serving(file) as serving:
        assert serving.ask(path) == 0, "frames of another codec are a miss"
