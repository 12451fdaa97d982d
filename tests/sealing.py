"""Keyed seals for tests: frames as an engine stores them, and as somebody else would."""

from __future__ import annotations

import struct
import zlib

import pytest
from machine import LAYOUT, NAMESPACE, payload
from serializing import CONTEXT

from kvtier_core.encoding.codec import FrameCodec
from kvtier_core.encoding.keyed_seal import KeyedSeal
from kvtier_core.frames.format import payload_of, seal_part
from kvtier_core.frames.identity import identity_of
from kvtier_core.types import FRAME_ALIGNMENT
from kvtier_testing.samples import make_keys

KEYS = KEY, OTHER_KEY, *_ = make_keys(4)
PAYLOAD = payload(KEY, 0)
SECRET, OTHER_SECRET = "correct horse battery staple, 32 or more", "another secret that is as long as that"
OURS, THEIRS = b"salt of one tenant", b"salt of another"
MAC, AES = KeyedSeal.of(SECRET, encrypt=False), KeyedSeal.of(SECRET, encrypt=True)
SEALS = pytest.mark.parametrize("keyed", [MAC, AES], ids=["mac", "aes"])

FIELDS_END, KEYED_END = 188, 240
FLAGS, LENGTH, NAMESPACE_AT, KEY_AT, PAYLOAD_SUM, DECODED_SUM = 10, 12, 20, 52, 180, 184
KEY_ID, NONCE, TAG = 192, 208, 220


def sealed(key=KEY, namespace=NAMESPACE, content=None):
    """A chunk in an arena's slot."""
    slot = memoryview(bytearray(LAYOUT.frame_nbytes))
    slot[FRAME_ALIGNMENT : FRAME_ALIGNMENT + LAYOUT.payload_nbytes] = content or payload(key, 0)
    seal_part(slot, namespace, key, LAYOUT.part_of(key))
    return slot


def codec_of(keyed, config=None, *, shared=False, namespace=NAMESPACE):
    serializer = config and config.open(CONTEXT)
    identity = identity_of(config) if config else None
    return FrameCodec(namespace, LAYOUT, serializer, identity, shared=shared, keyed_seal=keyed)


def read(codec, stored, *, key=KEY, salt=b""):
    """What a tier makes of a stored frame: the error, or its payload; and the slot."""
    slot = memoryview(bytearray(LAYOUT.frame_nbytes))
    buffer = codec.read_buffer(slot)
    stored = stored[: len(buffer)]
    buffer[: len(stored)] = stored
    error = codec.decode_verified(key, buffer, len(stored), slot, salt)
    return error or bytes(payload_of(slot)), slot


def stored_by(keyed, *, key=KEY, salt=b"", namespace=NAMESPACE, content=None, config=None):
    codec = codec_of(keyed, config, namespace=namespace)
    return bytes(codec.encode(key, sealed(key, namespace, content), salt))


def summed(frame):
    """Every checksum right, as whoever can write to the store makes them."""
    frame = bytearray(frame)
    nbytes = struct.unpack_from("<Q", frame, LENGTH)[0]
    body = memoryview(frame)[FRAME_ALIGNMENT : FRAME_ALIGNMENT + nbytes]
    encrypted = frame[FLAGS] & 4
    struct.pack_into("<I", frame, PAYLOAD_SUM, zlib.crc32(body))
    if not encrypted and frame[84:87] == b"raw":
        struct.pack_into("<I", frame, DECODED_SUM, zlib.crc32(body))
    struct.pack_into("<I", frame, FIELDS_END, zlib.crc32(frame[:FIELDS_END]))
    struct.pack_into("<I", frame, KEYED_END - 4, zlib.crc32(frame[KEY_ID : KEYED_END - 4]))
    return bytes(frame)
