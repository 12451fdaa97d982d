"""The zstd codec: every bit comes back, KV becomes shorter, and no input does harm."""

from __future__ import annotations

import random
import struct
import sys
import zlib

import attrs
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from packed_kv import KV

from kvtier_core.builtin.zstd import ZstdConfig
from kvtier_core.errors import BackendError
from kvtier_core.layouts import KVStructure
from kvtier_testing import SerializerLaws
from kvtier_testing.laws.serializers import decode, encode
from kvtier_testing.samples import make_context, make_layout


def layout_of(*dtypes):
    groups = [
        attrs.evolve(group, dtype=dtype, structure=KVStructure.KEYS_AND_VALUES)
        for dtype in dtypes
        for group in make_layout().groups
    ]
    return attrs.evolve(make_layout(), groups=groups)


def serializer_for(*dtypes, level=1):
    return ZstdConfig(level=level).open(make_context(layout=layout_of(*dtypes)))


def roundtrip(payload, *dtypes):
    serializer = serializer_for(*dtypes)
    encoded = encode(serializer, payload, len(payload) + 48)
    assert decode(serializer, encoded, len(payload)) == payload
    return encoded


class TestZstdLaws(SerializerLaws):
    layout = layout_of("bfloat16")

    def config(self, folder):
        return ZstdConfig()

    def others(self, folder):
        return [ZstdConfig(level=3)]


@given(st.binary(max_size=300), st.sampled_from(["bfloat16", "float32", "uint8"]))
def test_any_bytes_come_back(payload, dtype):
    roundtrip(payload, dtype)


def test_exponents_are_coded_and_mantissas_kept():
    encoded = roundtrip(KV, "bfloat16")
    assert len(encoded) < len(KV) * 0.8
    lengths = struct.unpack_from("<2Q", encoded, 16)
    assert lengths[0] == len(KV) // 2 > 2 * lengths[1]
    assert encoded[32 : 32 + lengths[0]] == KV[::2]


def test_noise_is_kept_as_it_is():
    noise = random.Random(0).randbytes(1 << 20)
    assert len(roundtrip(noise, "float32")) == 16 + 4 * 8 + len(noise)


def test_numbers_of_several_lengths_are_bytes():
    assert struct.unpack_from("<I", roundtrip(KV, "bfloat16", "float32"), 4) == (1,)


def test_the_format_is_that_of_every_release():
    """Else frames that an older one wrote would be damaged: raise the format version, here and in the header."""
    assert ZstdConfig.format_version == 1
    planes = struct.pack("<4sIQQQ", b"kvz\1", 2, 5, 2, 2) + bytes([0, 2, 1, 3, 4])
    assert decode(serializer_for("bfloat16"), planes, 5) == bytes(range(5))
    assert zlib.crc32(roundtrip(b"\0\1" * 9 + b"\2", "bfloat16")) == zlib.crc32(
        struct.pack("<4sIQQQ", b"kvz\1", 2, 19, 9, 9) + bytes(9) + b"\1" * 9 + b"\2"
    )


@pytest.mark.parametrize(
    "harmed",
    [
        lambda good: b"",
        lambda good: good[:20],
        lambda good: good[:-1],
        lambda good: good + b"\0",
        lambda good: b"kvz\2" + good[4:],
        lambda good: good[:4] + struct.pack("<I", 4) + good[8:],
        lambda good: good[:16] + struct.pack("<Q", 2**64 - 1) + good[24:],
        lambda good: good[:-2000] + bytes(2000),
    ],
)
def test_input_that_no_payload_encodes_to_is_refused(harmed):
    serializer = serializer_for("bfloat16")
    good = encode(serializer, KV, len(KV) + 48)
    with pytest.raises(BackendError, match=r"^zstd: "):
        decode(serializer, harmed(good), len(KV))


def test_a_plane_that_says_another_length_is_not_decoded():
    """It would be allocated."""
    bomb = zstandard.ZstdCompressor().compress(bytes(1 << 20))
    encoded = struct.pack("<4sIQQQ", b"kvz\1", 2, 2000, 1000, len(bomb)) + bytes(1000) + bomb
    with pytest.raises(BackendError, match="^zstd: a plane has the wrong length$"):
        decode(serializer_for("bfloat16"), encoded, 2000)


def test_without_its_library_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(BackendError, match=r"pip install 'kvtier\[zstd\]'$"):
        serializer_for("bfloat16")
