"""Frames of any bytes: `verify` takes none but the one that its format allows, and reads nothing beyond it."""

from __future__ import annotations

import struct
import zlib

import atheris
import harness

with atheris.instrument_imports(include=["kvtier_core"]):
    from kvtier_core.frames.format import payload_of, seal, verify
    from kvtier_core.frames.identity import RAW, CodecIdentity
    from kvtier_core.types import FRAME_ALIGNMENT, Namespace

NAMESPACE, OTHER = Namespace.of({"model": "fuzz"}), Namespace.of({"model": "other"})
KEY, OTHER_KEY = bytes(range(32)), bytes(32)
PAYLOAD = b"kv" * 40
FIELDS = struct.Struct("<8sHHQ32s32s64s32sII")
OTHER_CODEC = CodecIdentity("zip", bytes(range(32)), lossless=False)
HEADER_NBYTES = FIELDS.size + 4

#: The first byte of an input says how the rest is meant.
WHOLE, FITTING, ANY_LENGTH, ENCODED = 1, 2, 4, 8


def one_input(data: bytes) -> None:
    how, found = data[0] if data else 0, data[1:]
    if not how & WHOLE:  # without the zeros that nobody looks at, which are nearly all of a small frame
        found = found[:HEADER_NBYTES].ljust(FRAME_ALIGNMENT, b"\0") + found[HEADER_NBYTES:]
    if how & FITTING and len(found) >= FRAME_ALIGNMENT:
        fields = FIELDS.pack(*FIELDS.unpack_from(found)[:-2], *_payload_checksums(found))
        found = fields + struct.pack("<I", zlib.crc32(fields)) + found[HEADER_NBYTES:]
    codec = OTHER_CODEC if how & ENCODED else RAW
    asked = None if how & ANY_LENGTH else len(PAYLOAD)
    behind = bytearray(found + PAYLOAD)  # would make a frame that was cut whole again
    view = memoryview(behind)[: len(found)]
    error = verify(view, NAMESPACE, KEY, codec=codec, payload_nbytes=asked)
    right = len(found) >= FRAME_ALIGNMENT and _is_right(found, codec, asked)
    assert (error is None) == right, f"{error} for a frame that is {'right' if right else 'wrong'}"
    if right:
        nbytes = FIELDS.unpack_from(found)[3]
        assert bytes(payload_of(view)) == found[FRAME_ALIGNMENT : FRAME_ALIGNMENT + nbytes]
    assert bytes(view) == found, "a check changes nothing"


def _is_right(found: bytes, codec: CodecIdentity, asked: int | None) -> bool:
    """From the format in docs and tests, not from the code."""
    magic, version, flags, nbytes, digest, key, name, options, *checksums = FIELDS.unpack_from(found)
    named = (magic, version, digest, key) == (b"kvtier\r\n", 2, NAMESPACE.digest, KEY)
    encoded = (flags, name, options) == (codec.lossless, codec.type.encode().ljust(64, b"\0"), codec.digest)
    whole = nbytes <= len(found) - FRAME_ALIGNMENT and asked in (None, nbytes)
    payload, decoded = _payload_checksums(found)
    summed = checksums == [payload, decoded if codec == RAW else checksums[1]]
    header = struct.pack("<I", zlib.crc32(found[: FIELDS.size]))
    return named and encoded and whole and summed and found[FIELDS.size : HEADER_NBYTES] == header


def _payload_checksums(found: bytes) -> tuple[int, int]:
    """Of a raw frame, or of one whose payload decodes to itself."""
    checksum = zlib.crc32(found[FRAME_ALIGNMENT:][: FIELDS.unpack_from(found)[3]])
    return checksum, checksum


def seeds():
    for namespace, key, codec in (
        (NAMESPACE, KEY, RAW),
        (NAMESPACE, KEY, OTHER_CODEC),
        (OTHER, KEY, RAW),
        (NAMESPACE, OTHER_KEY, RAW),
    ):
        whole = memoryview(bytearray(FRAME_ALIGNMENT) + PAYLOAD)
        seal(whole, namespace, key, len(PAYLOAD), codec=codec)
        compact = bytes(whole[:HEADER_NBYTES]) + PAYLOAD
        for how in range(16):
            yield bytes([how]) + (bytes(whole) if how & WHOLE else compact)


if __name__ == "__main__":
    harness.fuzz(
        one_input, seeds(), longest=2 * FRAME_ALIGNMENT, words=[NAMESPACE.digest, OTHER.digest, KEY, OTHER_KEY]
    )
