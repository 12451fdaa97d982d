"""A seal that only holders of a key can make, and that can encrypt the payload: for stores that others can write to.

Needs `cryptography`, so this module is imported only if a tier has a ``seal_key``.
"""

from __future__ import annotations

import hmac
import math
import os
import struct
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Self

import attrs
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers import AEADDecryptionContext, Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import ECB, GCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDFExpand

from kvtier_core.frames.checksum import crc32
from kvtier_core.frames.format import (
    FrameError,
    Header,
    KeyedFields,
    header_of,
    keyed_fields_of,
    payload_of,
    verify_checksums,
    write_header,
)
from kvtier_core.frames.identity import KEY_ID_NBYTES, Protection, SealIdentity
from kvtier_core.types import KEY_NBYTES, ChunkKey

#: Length of the shortest secret: this number of random characters of any alphabet resists guessing.
MIN_SECRET_LENGTH = 32

#: The least result of `_bits` that is accepted. It is 88 to 127 for 32 random hexadecimal digits, 72 for 16 twice.
_MIN_BITS = 80

_AES_KEY_NBYTES = 32
_NONCE_NBYTES = 12
_HALF, _ROUNDS = KEY_NBYTES // 2, 4
_LEFT, _RIGHT = slice(_HALF), slice(_HALF, KEY_NBYTES)
_CHECKSUM = struct.Struct("<I")

# Why AES-GCM, with or without encryption: over 1 MiB and 32 MiB a MAC ran at 18 and 22 GiB/s as GMAC (AES-GCM without
# encryption), 10 and 12 as Poly1305, 1.7 and 1.5 as HMAC-SHA256, 1.2 as keyed BLAKE2b; a copy at 16. Poly1305 keeps
# the GIL, and two messages under one of its keys permit forgery. GMAC needs two equal nonces under one key for that:
# each chunk has its own key, so only frames of one chunk can collide, and 96 random bits are enough for those.


@attrs.frozen
class KeyedSeal:
    """The keyed seal of one tier's frames. All of the tier's threads use it at the same time.

    It covers the header's fields and the payload. The key of a frame is derived from the secret, the namespace and the
    frame's name; for encryption also from the salt of the request, so that the secret alone cannot decrypt a frame
    with a salt.

    Outside the process and in the header, a frame's name replaces the key of its chunk. Names are a permutation of
    keys that depends on the secret: four rounds of a Feistel network over AES (Luby and Rackoff 1988).
    """

    identity: SealIdentity
    _root: bytes = attrs.field(repr=False)
    _rounds: tuple[Cipher, ...] = attrs.field(repr=False, eq=False)

    @classmethod
    def of(cls, secret: str, *, encrypt: bool) -> Self:
        """The seal with this secret, taken literally. Raises ValueError if it could be guessed."""
        material = os.fsencode(secret)
        characters = list(map(ord, material.decode(errors="surrogateescape")))  # whatever the locale
        if len(characters) < MIN_SECRET_LENGTH:
            raise ValueError(f"it has fewer than {MIN_SECRET_LENGTH} characters; create one with openssl rand -hex 32")
        if min(_bits(characters), _bits([b - a for a, b in pairwise(characters)])) < _MIN_BITS:
            raise ValueError("it is repetitive or sequential, so guessable; create one with openssl rand -hex 32")
        root = hmac.digest(b"kvtier seal_key", material, "sha256")  # the first half of HKDF; `_derived` is the second
        protection = Protection.READING if encrypt else Protection.FORGERY
        # Earlier seals, with "key id" only, named their frames by the keys of chunks.
        identity = SealIdentity(protection, _derived(root, KEY_ID_NBYTES, b"key id, with names"))
        named = [b"names %d %d" % (protection.value, number) for number in range(_ROUNDS)]
        return cls(identity, root, tuple(Cipher(AES(_derived(root, _AES_KEY_NBYTES, each)), ECB()) for each in named))

    @property
    def encrypts(self) -> bool:
        """Are payloads encrypted?"""
        return self.identity.protection is Protection.READING

    def names(self, keys: Sequence[ChunkKey]) -> list[ChunkKey]:
        """The names of frames with these keys."""
        first, second = _permuted(self._rounds, keys, _LEFT, _RIGHT)
        return [ChunkKey(first[at : at + _HALF] + second[at : at + _HALF]) for at in range(0, len(first), _HALF)]

    def keys(self, names: Sequence[ChunkKey]) -> list[ChunkKey]:
        """The keys of frames with these names."""
        second, first = _permuted(self._rounds[::-1], names, _RIGHT, _LEFT)
        return [ChunkKey(first[at : at + _HALF] + second[at : at + _HALF]) for at in range(0, len(first), _HALF)]

    def close(self, frame: memoryview, payload: memoryview | None = None, *, salt: bytes = b"") -> None:
        """Seal ``frame``, which has the header of `format.seal`; its payload is in place, or is ``payload``.

        ``payload`` is read once and not changed.
        """
        header, stored = header_of(frame).protected(self.identity.protection), payload_of(frame)
        nonce, checksum = os.urandom(_NONCE_NBYTES), _CHECKSUM.pack(header.decoded_checksum)
        gcm = self._cipher(header, GCM(nonce), salt).encryptor()
        gcm.authenticate_additional_data(_bound(header))
        if self.encrypts:
            # The checksum would confirm a guess of the payload, so it is encrypted too.
            (hidden,) = _CHECKSUM.unpack(gcm.update(checksum))
            gcm.update_into(stored if payload is None else payload, stored)
            header = header._replace(payload_checksum=crc32(stored), decoded_checksum=hidden)
        else:
            if payload is not None:
                stored[:] = payload
            gcm.authenticate_additional_data(checksum)
            gcm.authenticate_additional_data(stored)
        gcm.finalize()
        write_header(frame, header, KeyedFields(self.identity.key_id, nonce, gcm.tag))

    def open(self, frame: memoryview, *, salt: bytes = b"") -> FrameError | None:
        """Verify and decrypt in place the payload of a frame whose header `format.expected_header` accepted.

        It becomes a frame without a keyed seal. Returns an error if the payload is damaged or the seal does not match;
        its content is then undefined. The checksum is computed only for the decrypted payload: the tag is stronger than
        the checksum of the encrypted bytes.
        """
        header, payload = header_of(frame), payload_of(frame)
        if len(payload) < header.payload_nbytes:
            return FrameError.SHORT
        gcm = self._opening(frame, salt)
        checksum = _CHECKSUM.pack(header.decoded_checksum)
        if self.encrypts:
            checksum = gcm.update(checksum)
            gcm.update_into(payload, payload)
        else:
            gcm.authenticate_additional_data(checksum)
            gcm.authenticate_additional_data(payload)
        if not _ends_well(gcm):
            if self.encrypts:  # encrypt again: the checksum of the encrypted bytes distinguishes damage from forgery
                again = self._cipher(header, GCM(keyed_fields_of(frame).nonce), salt).encryptor()
                again.update(checksum)
                again.update_into(payload, payload)
            return verify_checksums(header, crc32(payload)) or FrameError.FORGED
        summed = crc32(payload)
        header = header.protected(Protection.NONE)._replace(decoded_checksum=_CHECKSUM.unpack(checksum)[0])
        if self.encrypts:
            header = header._replace(payload_checksum=summed)
        write_header(frame, header)
        return verify_checksums(header, summed)

    def matches(self, page: memoryview, pieces: Iterable[bytes], *, salt: bytes = b"") -> bool:
        """Does the seal match this header page and the stored payload in ``pieces``? For `kvtier fsck`."""
        gcm = self._opening(page, salt)
        take = gcm.update if self.encrypts else gcm.authenticate_additional_data
        take(_CHECKSUM.pack(header_of(page).decoded_checksum))
        for piece in pieces:
            take(piece)
        return _ends_well(gcm)

    def _opening(self, page: memoryview, salt: bytes) -> AEADDecryptionContext:
        header, keyed = header_of(page), keyed_fields_of(page)
        gcm = self._cipher(header, GCM(keyed.nonce, keyed.tag), salt).decryptor()
        gcm.authenticate_additional_data(_bound(header))
        return gcm

    def _cipher(self, header: Header, mode: GCM, salt: bytes) -> Cipher:
        fixed = bytes([self.identity.protection.value]) + header.namespace + header.key
        return Cipher(AES(_derived(self._root, _AES_KEY_NBYTES, fixed + (salt if self.encrypts else b""))), mode)


def _permuted(rounds: Iterable[Cipher], blocks: Sequence[bytes], left: slice, right: slice) -> tuple[bytes, bytes]:
    """The permuted left and right halves of all blocks. A thousand together take 0.3 µs each, a single one 9."""
    first, second = (b"".join([block[half] for block in blocks]) for half in (left, right))
    for each in rounds:
        mask = int.from_bytes(each.encryptor().update(second), "big")
        first, second = second, (int.from_bytes(first, "big") ^ mask).to_bytes(len(second), "big")
    return first, second


def _bits(symbols: Sequence[int]) -> float:
    """Estimates the bits that a guess must get right: the Shannon entropy of a symbol, times the number of new ones.

    A symbol is not new if it and the two before it occur together elsewhere.
    """
    counts = Counter(symbols).values()
    new = 2 + len(set(zip(symbols, symbols[1:], symbols[2:], strict=False)))
    return new * sum(count * math.log2(len(symbols) / count) for count in counts) / len(symbols)


def _derived(root: bytes, nbytes: int, info: bytes) -> bytes:
    return HKDFExpand(SHA256(), nbytes, info).derive(root)


def _bound(header: Header) -> bytes:
    """The bytes of the header that a seal covers: all but the checksums.

    The checksum of the decoded payload is sealed together with the payload.
    """
    return header._replace(payload_checksum=0, decoded_checksum=0).packed()


def _ends_well(gcm: AEADDecryptionContext) -> bool:
    try:
        gcm.finalize()
    except InvalidTag:
        return False
    return True
