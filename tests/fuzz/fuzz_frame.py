"""Frames of any bytes: `frame.check` takes none but the one that its format allows, and reads nothing beyond it."""

from __future__ import annotations

import struct
import zlib

import atheris
import harness

with atheris.instrument_imports(include=["kvtier_core"]):
    from kvtier_core.frames import format as frame
    from kvtier_core.types import FRAME_ALIGNMENT, Namespace

NAMESPACE, OTHER = Namespace.of({"model": "fuzz"}), Namespace.of({"model": "other"})
KEY, OTHER_KEY = bytes(range(32)), bytes(32)
PAYLOAD = b"kv" * 40
FIELDS = struct.Struct("<8sHHQ32s32s")
HEADER_NBYTES = FIELDS.size + 4

#: The first byte of an input says how the rest is meant.
WHOLE, FITTING, ANY_LENGTH, OTHER_CODEC = 1, 2, 4, 8


def one_input(data: bytes) -> None:
    how, found = data[0] if data else 0, data[1:]
    if not how & WHOLE:  # without the zeros that nobody looks at, which are nearly all of a small frame
        found = found[:HEADER_NBYTES].ljust(FRAME_ALIGNMENT, b"\0") + found[HEADER_NBYTES:]
    if how & FITTING and len(found) >= FRAME_ALIGNMENT:
        found = found[: FIELDS.size] + _checksum(found) + found[HEADER_NBYTES:]
    codec = 7 if how & OTHER_CODEC else frame.RAW
    asked = None if how & ANY_LENGTH else len(PAYLOAD)
    behind = bytearray(found + PAYLOAD)  # would make a frame that was cut whole again
    view = memoryview(behind)[: len(found)]
    damage = frame.check(view, NAMESPACE, KEY, codec=codec, payload_nbytes=asked)
    right = len(found) >= FRAME_ALIGNMENT and _is_right(found, codec, asked)
    assert (damage is None) == right, f"{damage} for a frame that is {'right' if right else 'wrong'}"
    if right:
        nbytes = FIELDS.unpack_from(found)[3]
        assert bytes(frame.payload_of(view)) == found[FRAME_ALIGNMENT : FRAME_ALIGNMENT + nbytes]
    assert bytes(view) == found, "a check changes nothing"


def _is_right(found: bytes, codec: int, asked: int | None) -> bool:
    """From the format in docs and tests, not from the code."""
    magic, version, its_codec, nbytes, digest, key = FIELDS.unpack_from(found)
    named = (magic, version, its_codec, digest, key) == (b"kvtier\r\n", 1, codec, NAMESPACE.digest, KEY)
    whole = nbytes <= len(found) - FRAME_ALIGNMENT and asked in (None, nbytes)
    return named and whole and found[FIELDS.size : HEADER_NBYTES] == _checksum(found)


def _checksum(found: bytes) -> bytes:
    nbytes = FIELDS.unpack_from(found)[3]
    return struct.pack("<I", zlib.crc32(found[FRAME_ALIGNMENT:][:nbytes], zlib.crc32(found[: FIELDS.size])))


def seeds():
    for namespace, key, codec in ((NAMESPACE, KEY, 0), (NAMESPACE, KEY, 7), (OTHER, KEY, 0), (NAMESPACE, OTHER_KEY, 0)):
        whole = memoryview(bytearray(FRAME_ALIGNMENT) + PAYLOAD)
        frame.seal(whole, namespace, key, len(PAYLOAD), codec)
        compact = bytes(whole[:HEADER_NBYTES]) + PAYLOAD
        for how in range(16):
            yield bytes([how]) + (bytes(whole) if how & WHOLE else compact)


if __name__ == "__main__":
    harness.fuzz(
        one_input, seeds(), longest=2 * FRAME_ALIGNMENT, words=[NAMESPACE.digest, OTHER.digest, KEY, OTHER_KEY]
    )
