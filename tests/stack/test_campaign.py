"""Frames are harmed at random, as disks, bugs and strangers harm them, and not one wrong byte may be served.

What must be right are a frame's meaning bytes: the 192 bytes of header fields and checksums, and the payload, as long
as the header says. The rest of the header page, the rest of the last page and whatever follows are nobody's bytes:
no reader looks at them. So the verdict is known exactly, both ways: a frame is good if, and only if, its meaning
bytes are the very ones that were stored. One that names another codec or format version in a header that is otherwise
whole is incompatible: it is not served, and it is not deleted either.

LONG says how many frames are harmed, CAMPAIGN_SEED how. Of ``pytest -s`` each test prints what it did.
"""

from __future__ import annotations

import contextlib
import os
import random
import struct
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import attrs
import pytest
from benches import TierBench
from machine import open_codec
from sizes import LONG
from test_machine import ZipConfig

from kvtier_core.builtin.raw import RawConfig
from kvtier_core.frames.format import FrameError, payload_of, seal, verify
from kvtier_core.frames.identity import RAW, CodecIdentity, identity_of
from kvtier_core.interfaces import SerializerConfig
from kvtier_core.layouts import ChunkLayout
from kvtier_core.stack.store_tier.tier import FrameWrite
from kvtier_core.types import FRAME_ALIGNMENT, KEY_NBYTES, ChunkKey, Event, EventKind, Namespace, Nbytes
from kvtier_core.work.io_pool import IOPool
from kvtier_disk.config import DiskConfig
from kvtier_testing.samples import make_context, make_keys, make_layout, make_namespace, same

pytestmark = pytest.mark.long

ROUNDS = 4000 * LONG
SEED = int(os.environ.get("CAMPAIGN_SEED", "0"))

ZIP = identity_of(ZipConfig())
OURS, THEIRS = make_namespace("today's weights"), make_namespace("yesterday's weights")
KEYS = make_keys(6)
#: Three pages of payload, and one that ends in the middle of a page.
LAYOUTS = [make_layout((2048, 1024), blocks=4), make_layout((1500, 700), blocks=3)]

HEADER_NBYTES = 192
CODEC_AT, CODEC_END = 84, 180
CHECKSUM_AT = 188
#: Name of a field, its place and format, and values that a reader could fall for.
FIELDS = [
    ("magic", 0, "8s", [b"kvtier\n\n", b"KVTIER\r\n", bytes(8)]),
    ("version", 8, "<H", [0, 1, 3, 0xFFFF]),
    ("flags", 10, "<H", [0, 2, 3, 0xFFFF]),
    ("length", 12, "<Q", [0, 1, FRAME_ALIGNMENT, 1 << 50, (1 << 63) - 1, 1 << 63, (1 << 64) - 1]),
    ("namespace", 20, "32s", [THEIRS.digest, bytes(32)]),
    ("key", 52, "32s", [*KEYS, bytes(KEY_NBYTES)]),
    ("codec type", CODEC_AT, "64s", [b"raw".ljust(64, b"\0"), b"zip".ljust(64, b"\0"), bytes(64)]),
    ("codec options", 148, "32s", [bytes(32), ZIP.digest]),
    ("checksum of the payload", CODEC_END, "<I", [0, 0xFFFFFFFF]),
    ("checksum of the decoded", 184, "<I", [0, 0xFFFFFFFF]),
    ("checksum", CHECKSUM_AT, "<I", [0, 0xFFFFFFFF]),
]


@attrs.frozen
class Stored:
    """A frame as it was stored, and what its reader knows of it."""

    key: ChunkKey
    whole: bytes
    codec: CodecIdentity = RAW

    @property
    def payload_nbytes(self) -> int:
        return struct.unpack_from("<Q", self.whole, 12)[0]

    @property
    def payload(self) -> bytes:
        return self.whole[FRAME_ALIGNMENT : FRAME_ALIGNMENT + self.payload_nbytes]

    def is_meant_by(self, found: bytes) -> bool:
        """Are all meaning bytes those that were stored?"""
        end = FRAME_ALIGNMENT + self.payload_nbytes
        return found[:HEADER_NBYTES] == self.whole[:HEADER_NBYTES] and found[FRAME_ALIGNMENT:end] == self.payload

    def is_incompatible(self, found: bytes) -> bool:
        """Is it a frame of this key that another codec or version wrote? From the format, not from the code."""
        if len(found) < FRAME_ALIGNMENT or found[:8] != self.whole[:8]:
            return False
        version, flags = struct.unpack_from("<HH", found, 8)
        if version != 2:
            return True
        if found[CHECKSUM_AT:HEADER_NBYTES] != struct.pack("<I", zlib.crc32(found[:CHECKSUM_AT])):
            return False
        ours = found[20:CODEC_AT] == self.whole[20:CODEC_AT]
        same_codec = found[10:12] + found[CODEC_AT:CODEC_END] == self.whole[10:12] + self.whole[CODEC_AT:CODEC_END]
        return flags > 1 or (ours and not same_codec)

    def sealed_again(self, *, namespace: Namespace = OURS, key: ChunkKey | None = None, payload: bytes) -> bytes:
        again = bytearray(whole_pages(payload))
        seal(memoryview(again), namespace, key or self.key, len(payload), codec=self.codec)
        return bytes(again)


def whole_pages(payload: bytes) -> bytes:
    return bytes(FRAME_ALIGNMENT) + payload + bytes(-len(payload) % FRAME_ALIGNMENT)


def raw_frame(key: ChunkKey, payload: bytes) -> bytes:
    return Stored(key, b"").sealed_again(payload=payload)


# -- harm ----------------------------------------------------------------------------------------------

#: From a frame, and others that a mistake could put in its place, to what is found instead.
Harm = Callable[[random.Random, Stored, Sequence[bytes]], bytes]


def nothing(rng, stored, others):
    return stored.whole


def a_flipped_bit(rng, stored, others):
    place = a_place(rng, stored)
    return put(stored.whole, place, [stored.whole[place] ^ 1 << rng.randrange(8)])


def a_changed_byte(rng, stored, others):
    place = a_place(rng, stored)
    return put(stored.whole, place, [stored.whole[place] ^ rng.randint(1, 255)])


def zeroed_512_bytes(rng, stored, others):
    return put(stored.whole, a_block(rng, stored, 512), bytes(512))


def zeroed_4096_bytes(rng, stored, others):
    return put(stored.whole, a_block(rng, stored, 4096), bytes(4096))


def swapped_512_bytes(rng, stored, others):
    return swapped(rng, stored, 512)


def swapped_4096_bytes(rng, stored, others):
    return swapped(rng, stored, 4096)


def cut_short(rng, stored, others):
    return stored.whole[: rng.randrange(len(stored.whole))]


def cut_to_whole_pages(rng, stored, others):
    """As a power cut leaves it."""
    return stored.whole[: rng.randrange(0, len(stored.whole), FRAME_ALIGNMENT)]


def extended(rng, stored, others):
    more = rng.choice([bytes(rng.choice([1, 512, FRAME_ALIGNMENT])), rng.randbytes(rng.randint(1, 600)), stored.whole])
    return stored.whole + more


def a_frame_of_another_key(rng, stored, others):
    """Of today or of before, as when two files change places."""
    return rng.choice([other for other in others if key_of(other) != stored.key])


def a_frame_of_another_namespace(rng, stored, others):
    """The same key, as an engine with other weights stored it."""
    other = rng.choice([stored.payload, rng.randbytes(stored.payload_nbytes)])
    return stored.sealed_again(namespace=THEIRS, payload=other)


def the_header_of_another_frame(rng, stored, others):
    return rng.choice(others)[: rng.choice([HEADER_NBYTES, FRAME_ALIGNMENT])] + stored.whole[FRAME_ALIGNMENT:]


def a_field_rewritten(rng, stored, others):
    return rewritten(rng, stored, FIELDS)


#: What happens to frames without anybody's will.
ACCIDENTS: list[Harm] = [
    nothing,
    a_flipped_bit,
    a_changed_byte,
    zeroed_512_bytes,
    zeroed_4096_bytes,
    swapped_512_bytes,
    swapped_4096_bytes,
    cut_short,
    cut_to_whole_pages,
    extended,
    a_frame_of_another_key,
    a_frame_of_another_namespace,
    the_header_of_another_frame,
    a_field_rewritten,
]


def a_field_rewritten_and_the_checksum_too(rng, stored, others):
    """Each field must be refused for its own sake: this is what a bug in whoever seals would write."""
    found = rewritten(rng, stored, FIELDS[:-1])
    (claimed,) = struct.unpack_from("<Q", found, 12)
    if claimed != stored.payload_nbytes:
        checksum = zlib.crc32(found[FRAME_ALIGNMENT:][:claimed])
        found = put(found, CODEC_END, struct.pack("<II", checksum, checksum))
    return put(found, CHECKSUM_AT, struct.pack("<I", zlib.crc32(found[:CHECKSUM_AT])))


def a_payload_of_another_length(rng, stored, others):
    """A whole frame of this very key, sealed when a chunk was shorter or longer."""
    delta = rng.choice([-FRAME_ALIGNMENT, -1, 1, FRAME_ALIGNMENT])
    return stored.sealed_again(payload=(stored.payload + bytes(FRAME_ALIGNMENT))[: stored.payload_nbytes + delta])


#: Lies whose checksum fits. Only a reader who knows how long the payload must be can tell them all.
LIES: list[Harm] = [a_field_rewritten_and_the_checksum_too, a_payload_of_another_length]


def a_place(rng: random.Random, stored: Stored) -> int:
    """Half of them in the header, which is so small that it would hardly be met."""
    return rng.randrange(rng.choice([HEADER_NBYTES, len(stored.whole)]))


def a_block(rng: random.Random, stored: Stored, nbytes: int) -> int:
    return rng.randrange(0, len(stored.whole), nbytes)


def swapped(rng: random.Random, stored: Stored, nbytes: int) -> bytes:
    a, b = a_block(rng, stored, nbytes), a_block(rng, stored, nbytes)
    found = put(stored.whole, a, stored.whole[b : b + nbytes])
    return put(found, b, stored.whole[a : a + nbytes])


def rewritten(rng: random.Random, stored: Stored, fields: Sequence[tuple]) -> bytes:
    """One field says something else."""
    _, place, form, telling = rng.choice(fields)
    drawn = struct.unpack(form, rng.randbytes(struct.calcsize(form)))[0]
    (true,) = struct.unpack_from(form, stored.whole, place)
    return put(stored.whole, place, struct.pack(form, rng.choice([v for v in [drawn, *telling] if v != true])))


def put(whole: bytes, place: int, piece: Sequence[int]) -> bytes:
    return whole[:place] + bytes(piece) + whole[place + len(piece) :]


def key_of(whole: bytes) -> bytes:
    return whole[52:84]


# -- the tally -----------------------------------------------------------------------------------------


@attrs.define
class Tally:
    """How often each kind was tried, and how often the reader would have got other bytes."""

    tried: Counter[str] = attrs.field(factory=Counter)
    harmed: Counter[str] = attrs.field(factory=Counter)
    refused: Counter[str] = attrs.field(factory=Counter)

    def count(self, kind: Harm, *, intact: bool, accepted: bool) -> None:
        self.tried[kind.__name__] += 1
        self.harmed[kind.__name__] += not intact
        self.refused[kind.__name__] += not accepted

    def settle(self, kinds: Sequence[Harm]) -> None:
        """Nothing was left out, and each kind that can did harm."""
        print(f"\nseed {SEED:<42}   tried  harmed  refused")
        for kind in kinds:
            name = kind.__name__
            print(f"  {name:45} {self.tried[name]:7} {self.harmed[name]:7} {self.refused[name]:8}")
        assert {kind.__name__ for kind in kinds} == set(self.tried), "a kind was not tried"
        assert self.tried["nothing"] and not self.refused["nothing"]
        assert {kind.__name__ for kind in kinds if not self.harmed[kind.__name__]} == {"nothing", "extended"}


def a_payload(rng: random.Random, nbytes: int) -> bytes:
    """Noise, zeros, or pages that resemble each other: swapping or zeroing those may change nothing."""
    kind = rng.randrange(4)
    if kind == 0:
        return bytes(nbytes)
    if kind == 1:
        return (rng.randbytes(512) * (nbytes // 512 + 1))[:nbytes]
    if kind == 2:
        return b"".join(rng.choice([bytes(512), rng.randbytes(512)]) for _ in range(nbytes // 512 + 1))[:nbytes]
    return rng.randbytes(nbytes)


# -- frames in memory ----------------------------------------------------------------------------------


def test_no_harmed_frame_passes_the_check():
    """`verify`, as a tier without a serializer calls it."""
    kinds, tally = [*ACCIDENTS, *LIES], Tally()
    content = random.Random(SEED)
    shelves = [
        [Stored(key, raw_frame(key, a_payload(content, layout.payload_nbytes))) for key in KEYS for _ in range(2)]
        for layout in LAYOUTS
    ]
    for i in range(max(ROUNDS, 10 * len(kinds))):
        rng = random.Random(f"{SEED} {i}")
        kind = kinds[i % len(kinds)]
        shelf = rng.choice(shelves)
        stored = rng.choice(shelf)
        found = kind(rng, stored, [other.whole for other in shelf if other is not stored])
        error = verify(memoryview(found), OURS, stored.key, payload_nbytes=stored.payload_nbytes)
        intact = stored.is_meant_by(found)
        tally.count(kind, intact=intact, accepted=error is None)
        assert (error is None) == intact, f"seed {SEED}, round {i}: {kind.__name__}: {error}"
        if error is not None:
            assert error.incompatible == stored.is_incompatible(found), (
                f"seed {SEED}, round {i}: {kind.__name__}: {error}"
            )
        else:
            assert same(payload_of(memoryview(found)), stored.payload)
    tally.settle(kinds)


# -- frames on a disk ----------------------------------------------------------------------------------


class DiskBench(TierBench):
    """A tier over a folder, as a stack opens it."""

    def __init__(self, folder: Path, layout: ChunkLayout, serializer: SerializerConfig):
        ctx = make_context(namespace=OURS, layout=layout)
        disk, codec = DiskConfig(path=folder, min_free=Nbytes(0)).open(ctx), open_codec(serializer, ctx)
        super().__init__(frames=1000, inflight=1000, shelf=disk, pool=IOPool("campaign", 2), codec=codec, layout=layout)
        self.folder = folder
        self.settle()

    def write(self, frames: dict[ChunkKey, bytes]) -> None:
        """Raw frames, whatever is in them."""
        self.tier.write([FrameWrite(key, None, memoryview(whole)) for key, whole in frames.items()], lambda key: None)
        self.settle()
        assert [event.kind for event in self.told()] == [EventKind.WRITTEN]

    def read(self, keys: Sequence[ChunkKey]) -> dict[ChunkKey, memoryview]:
        """The slots of those whose read began; it is over."""
        slots = super().read(*keys)
        self.settle()
        return slots

    def file(self, key: ChunkKey) -> Path:
        """Where the disk keeps this frame."""
        name = key.hex()
        return self.folder / OURS.digest.hex()[:16] / name[:2] / f"{name}.kv"

    def told(self) -> list[Event]:
        """The events since the last time."""
        events, self.tier.events[:] = list(self.tier.events), []
        return events

    def told_of_misses(self) -> tuple[set[ChunkKey], set[ChunkKey], set[ChunkKey]]:
        """The keys that were told to be corrupt, incompatible and missing; each once, and why."""
        kinds = (EventKind.CORRUPT, EventKind.INCOMPATIBLE, EventKind.MISSING)
        keys: dict[EventKind, list[ChunkKey]] = {kind: [] for kind in kinds}
        for event in self.told():
            if event.kind is EventKind.READ:  # the others of its batch
                continue
            assert event.kind in keys, event
            keys[event.kind] += event.keys
            incompatible = event.kind is EventKind.INCOMPATIBLE
            whys = {error.value for error in FrameError if error.incompatible is incompatible}
            assert event.kind is EventKind.MISSING or event.why in whys
        told = [set(keys[kind]) for kind in kinds]
        assert len(set().union(*told)) == sum(map(len, keys.values()))
        return tuple(told)


@contextlib.contextmanager
def opened(folder: Path, layout: ChunkLayout, serializer: SerializerConfig) -> Iterator[DiskBench]:
    bench = DiskBench(folder, layout, serializer)
    try:
        yield bench
    finally:
        assert bench.tier.close(10.0)


@pytest.mark.parametrize("serializer", [RawConfig(), ZipConfig()], ids=["raw", "zip"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=["whole pages", "half a page"])
def test_no_harmed_file_is_served(tmp_path, layout, serializer):
    """A tier, its door and a disk: a harmed frame is a miss, is told of, and is not found again."""
    kinds = [*ACCIDENTS, *LIES] if serializer == RawConfig() else ACCIDENTS
    tally, before = Tally(), [raw_frame(make_keys(9)[8], bytes(layout.payload_nbytes))]
    for batch in range(max(10, ROUNDS // 10 // len(kinds))):
        rng = random.Random(f"{SEED} {layout} {serializer.type} {batch}")
        keys = {ChunkKey(rng.randbytes(KEY_NBYTES)): kind for kind in kinds}
        payloads = {key: a_payload(rng, layout.payload_nbytes) for key in keys}
        with opened(tmp_path, layout, serializer) as bench:
            bench.write({key: raw_frame(key, payloads[key]) for key in keys})
            codec = RAW if serializer == RawConfig() else ZIP
            stored = {key: Stored(key, bench.file(key).read_bytes(), codec) for key in keys}
            harmed = {}
            for key, kind in keys.items():
                others = [*before, *(other.whole for other in stored.values() if other.key != key)]
                harmed[key] = kind(rng, stored[key], others)
                bench.file(key).write_bytes(harmed[key])
            slots = bench.read(list(keys))
            assert list(slots) == list(keys)
            corrupt, incompatible, lost = bench.told_of_misses()
            for key, kind in keys.items():
                where = f"seed {SEED}, batch {batch}: {kind.__name__}"
                intact, readable = stored[key].is_meant_by(harmed[key]), _can_be_read(harmed[key], bench, serializer)
                tally.count(kind, intact=intact, accepted=key in bench.good)
                assert (key in bench.good) == (intact and readable) == (key not in bench.bad), where
                other = stored[key].is_incompatible(harmed[key])
                assert (key in corrupt) == (readable and not intact and not other), where
                assert (key in incompatible) == (readable and other), where
                assert (key in lost) == (not readable), where
                assert bench.tier.has(key) == (key in bench.good), f"{where}: is found again"
                assert bench.file(key).exists() == (key not in corrupt | lost), where
            for key in bench.good:
                assert verify(slots[key], OURS, key, payload_nbytes=layout.payload_nbytes) is None
                assert same(payload_of(slots[key]), payloads[key]), "a slot holds other bytes than were stored"
            assert not bench.read(bench.bad), "a miss is read again"
        with opened(tmp_path, layout, serializer) as bench:
            assert not any(map(bench.tier.has, corrupt)), "a damaged frame is found again after a restart"
            bench.tier.invalidate_all(OURS)
            bench.settle()
        before = [other.whole for other in stored.values()]
    tally.settle(kinds)


def _can_be_read(found: bytes, bench: DiskBench, serializer: SerializerConfig) -> bool:
    """What has no frame's length, or fits into no slot, is lost before anybody looks at it."""
    codec = open_codec(serializer, make_context(namespace=OURS, layout=bench.layout))
    return 0 < len(found) <= codec.max_frame_nbytes and len(found) % FRAME_ALIGNMENT == 0


def test_a_frame_that_cannot_be_decoded_is_incompatible(tmp_path):
    """Its checksums fit: another release of the serializer wrote it. Its neighbours are served."""
    layout = LAYOUTS[0]
    with opened(tmp_path, layout, ZipConfig()) as bench:
        bench.write({key: raw_frame(key, bytes(layout.payload_nbytes)) for key in KEYS})
        odd = Stored(KEYS[0], bench.file(KEYS[0]).read_bytes(), ZIP)
        bench.file(KEYS[0]).write_bytes(odd.sealed_again(payload=b"not zlib's"))
        bench.read(KEYS)
        assert bench.told_of_misses() == (set(), {KEYS[0]}, set())
        assert (bench.good, bench.bad) == (list(KEYS[1:]), [KEYS[0]])
        assert not bench.tier.has(KEYS[0])
        assert bench.file(KEYS[0]).exists()
