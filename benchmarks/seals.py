"""What a ``seal_key`` costs a store tier for each frame, against a copy and the checksum that every frame has."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path

import attrs
from cryptography.hazmat.primitives.ciphers import AEADEncryptionContext, Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import GCM

from benchmarks.measure import GIB, Case, Table, interleaved, progress, sized
from kvtier_core.encoding.codec import FrameCodec
from kvtier_core.encoding.keyed_seal import KeyedSeal
from kvtier_core.frames.checksum import crc32
from kvtier_core.frames.format import seal
from kvtier_core.layouts import ChunkLayout
from kvtier_core.types import FRAME_HEADER_NBYTES, ChunkKey, Namespace, Nbytes
from kvtier_testing.samples import make_layout

ROUNDS, REPEATS = sized((15, 5), (1, 1))
COPY = "memcpy"
KEY = ChunkKey(bytes(32))
NAMESPACE = Namespace.of({"benchmark": "seals"})
SALT = b"of a tenant"
#: Payload and places used in turn: the same bytes in each table.
SHAPES = sized(((1 << 20, 64), (8 << 20, 8), (32 << 20, 2)), ((1 << 20, 2),))


def tables(folder: Path) -> Iterator[Table]:
    for nbytes, places in SHAPES:
        progress(f"seals: frames of {Nbytes(nbytes)}, {ROUNDS} rounds")
        yield _table(make_layout((nbytes,), blocks=1), places)


def _table(layout: ChunkLayout, places: int) -> Table:
    nbytes, bench = layout.payload_nbytes, _Bench(layout, places)
    times = interleaved(bench.cases(), ROUNDS, REPEATS)
    return Table(
        title=f"Seals: frames of {Nbytes(nbytes)}",
        says="On one thread, in memory. AES-GCM encrypts a payload into memory that is there, and GMAC is the same for "
        "what is not encrypted. Written: from an arena's slot to the frame that the store is handed. Read: verified, "
        "decrypted where it was read to, and made a frame of the arena; without a key it is the checksum alone. "
        f"{places} slots are used in turn. The ratio is speed to that of one memcpy in the same round: median (min to "
        f"max) of {ROUNDS} rounds, each the best of {REPEATS}.",
        header=("", "GiB/s", "of memcpy"),
        rows=[
            (name, f"{nbytes / times.median(name) / GIB:.1f}", "1" if name == COPY else times.ratio(COPY, name))
            for name in times.seconds
        ],
    )


def _gcm() -> AEADEncryptionContext:
    return Cipher(AES(bytes(32)), GCM(bytes(12))).encryptor()


@attrs.frozen
class _Bench:
    layout: ChunkLayout
    places: int
    secret: str = attrs.field(factory=lambda: secrets.token_hex(32), repr=False)

    def cases(self) -> list[Case]:
        slots = [self._slot() for _ in range(self.places)]
        into = [memoryview(bytearray(len(slot))) for slot in slots]
        sealed, encrypted = (KeyedSeal.of(self.secret, encrypt=encrypt) for encrypt in (False, True))
        return [
            Case(COPY, self._in_turn(lambda place: into[place].__setitem__(slice(None), slots[place]))),
            Case("AES-GCM", self._in_turn(lambda place: _gcm().update_into(slots[place], into[place]))),
            Case("GMAC", self._in_turn(lambda place: _gcm().authenticate_additional_data(slots[place]))),
            Case("checksum", self._in_turn(lambda place: crc32(slots[place][FRAME_HEADER_NBYTES:]))),
            self._written("written, sealed", sealed, slots),
            self._written("written, encrypted", encrypted, slots),
            self._read("read", None, slots),
            self._read("read, sealed", sealed, slots),
            self._read("read, encrypted", encrypted, slots),
        ]

    def _written(self, name: str, keyed: KeyedSeal, slots: list[memoryview]) -> Case:
        codec = FrameCodec(NAMESPACE, self.layout, keyed_seal=keyed)
        return Case(name, self._in_turn(lambda place: codec.written([codec.encode(KEY, slots[place], SALT)])))

    def _read(self, name: str, keyed: KeyedSeal | None, slots: list[memoryview]) -> Case:
        codec = FrameCodec(NAMESPACE, self.layout, keyed_seal=keyed)
        stored = bytes(codec.encode(KEY, slots[0], SALT))
        copies = [memoryview(bytearray(len(stored))) for _ in range(self.places)]
        turns = itertools.cycle(copies)
        here = [copies[0]]

        def arrive() -> None:
            here[0] = next(turns)
            here[0][:] = stored

        def read() -> None:
            error = codec.decode_verified(KEY, here[0], len(stored), here[0], SALT)
            if error is not None:
                raise RuntimeError(f"the frame is {error.value}")

        return Case(name, read, before=arrive)

    def _slot(self) -> memoryview:
        slot = memoryview(bytearray(self.layout.frame_nbytes))
        slot[FRAME_HEADER_NBYTES:] = secrets.token_bytes(len(slot) - FRAME_HEADER_NBYTES)
        seal(slot, NAMESPACE, KEY, self.layout.payload_nbytes)
        return slot

    def _in_turn(self, work: Callable[[int], object]) -> Callable[[], object]:
        turns = itertools.cycle(range(self.places))
        return lambda: work(next(turns))
