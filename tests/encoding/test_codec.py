"""What names a codec, and what a tier's codec makes of frames that it did not write."""

from __future__ import annotations

import contextlib
import enum
import zlib
from pathlib import Path
from typing import ClassVar

import attrs
import pytest
from machine import LAYOUT, NAMESPACE, open_codec, payload
from patience import HANG
from serializing import CONTEXT, LossyConfig, UpperBits, Xor, XorConfig

from kvtier_core.builtin.heap import HeapConfig
from kvtier_core.builtin.raw import RawConfig
from kvtier_core.config.model import ArenaTierConfig, StackConfig, StoreTierConfig
from kvtier_core.config.open import open_stack
from kvtier_core.encoding.codec import FrameCodec
from kvtier_core.errors import BackendError, ConfigError, ContractError
from kvtier_core.frames.format import FrameError, header_of, payload_of, seal, seal_part, verify
from kvtier_core.frames.identity import RAW, CodecIdentity, identity_of, lossy
from kvtier_core.interfaces import SerializerConfig
from kvtier_core.transfer.packing import pack
from kvtier_core.types import FRAME_ALIGNMENT, Namespace, Nbytes, Seconds
from kvtier_disk.config import DiskConfig
from kvtier_testing.samples import address_of, make_key

KEY = make_key(0)
PAYLOAD = payload(KEY, 0)


def sealed(codec=RAW, content=PAYLOAD):
    view = memoryview(bytearray(LAYOUT.frame_nbytes))
    view[FRAME_ALIGNMENT : FRAME_ALIGNMENT + len(content)] = content
    seal(view, NAMESPACE, KEY, len(content), codec=codec)
    return view


def codec_of(config):
    return open_codec(config, CONTEXT)


def read(config, stored):
    """What a tier with this serializer makes of a stored frame: the error, or its payload."""
    codec = codec_of(config)
    slot = memoryview(bytearray(LAYOUT.frame_nbytes))
    buffer = codec.read_buffer(slot)
    buffer[: len(stored)] = stored
    error = codec.decode_verified(KEY, buffer, len(stored), slot)
    return error or bytes(payload_of(slot)), slot


# -- identity ------------------------------------------------------------------------------------------


class Mode(enum.Enum):
    FAST = "fast"
    SMALL = "small"


@attrs.frozen
class Inner:
    window: int = 1


@attrs.frozen
class Rich(SerializerConfig):
    """A field of every kind that a setting can have."""

    type: ClassVar[str] = "rich"
    lossless: ClassVar[bool] = True
    level: int = 1
    name: str = "1"
    size: Nbytes = Nbytes(1)
    share: float = 1.0
    pause: Seconds = Seconds(1)
    flag: bool = True
    mode: Mode = Mode.FAST
    path: Path = Path("1")
    several: tuple[int, ...] = (1,)
    inner: Inner = Inner()
    maybe: int | None = None

    def open(self, ctx):
        return Xor(self.level)


OPTIONS = {
    "level": 2,
    "name": "true",
    "size": Nbytes(2),
    "share": 1.0000000000000002,
    "pause": Seconds(2),
    "flag": False,
    "mode": Mode.SMALL,
    "path": Path("2"),
    "several": (1, 1),
    "inner": Inner(2),
    "maybe": 0,
}


def test_every_option_counts():
    assert set(OPTIONS) == {field.name for field in attrs.fields(Rich)}
    others = [attrs.evolve(Rich(), **{name: value}) for name, value in OPTIONS.items()]
    assert len({identity_of(config).digest for config in (Rich(), *others)}) == 1 + len(OPTIONS)


def test_the_format_version_of_a_plugin_counts():
    @attrs.frozen
    class Next(Rich):
        format_version: ClassVar[int] = 2

    assert identity_of(Next()).digest != identity_of(Rich()).digest


def test_the_identity_is_the_same_on_every_machine():
    """By hand: blake2b of this text, personalised. It must never change, or every cache is cold."""
    assert identity_of(XorConfig()) == CodecIdentity(
        "xor", bytes.fromhex("10c5c30973443fa08bf534df8d44dde9fae2e86dc476c5fd1e6c45d3e3b9b172"), lossless=True
    )


def test_no_serializer_passes_for_raw():
    """It may call itself so: then its frames are read by itself alone."""

    class CallsItselfRaw(XorConfig):
        type: ClassVar[str] = "raw"

    identity = identity_of(CallsItselfRaw())
    assert identity.type == "raw" and identity != RAW
    stored = codec_of(CallsItselfRaw()).encode(KEY, sealed())
    assert read(RawConfig(), stored)[0] is FrameError.CODEC
    assert read(CallsItselfRaw(), sealed())[0] is FrameError.CODEC
    assert read(CallsItselfRaw(), stored)[0] == PAYLOAD


def test_a_codec_that_opens_no_serializer_is_raw():
    assert codec_of(RawConfig()).identity == RAW
    with pytest.raises(ContractError):
        FrameCodec(NAMESPACE, LAYOUT, Xor(1))
    with pytest.raises(ContractError):
        FrameCodec(NAMESPACE, LAYOUT, None, identity_of(XorConfig()))


class SaysNothing(XorConfig):
    lossless: ClassVar[None] = None


class HasALongName(XorConfig):
    type: ClassVar[str] = 65 * "x"


class HasAVersionOfWords(XorConfig):
    format_version: ClassVar[str] = "two"


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (SaysNothing(), "xor does not state whether it is lossless"),
        (HasALongName(), "is not of 1 to 64 bytes"),
        (HasAVersionOfWords(), "the format version of xor is not an int"),
        (XorConfig(mask=object()), "its option mask is a object, which cannot be compared between processes"),
    ],
    ids=lambda part: type(part).__name__,
)
def test_a_codec_that_cannot_be_named_is_not_opened(config, why):
    with pytest.raises(ConfigError, match=why):
        identity_of(config)


def test_the_problem_is_reported_at_the_serializer(tmp_path):
    tiers = (
        ArenaTierConfig("heap", HeapConfig(), Nbytes(1 << 20)),
        StoreTierConfig("disk", DiskConfig(path=tmp_path), Nbytes(1 << 20), serializer=SaysNothing()),
    )
    with pytest.raises(ConfigError) as raised:
        open_stack(StackConfig(tiers), CONTEXT)
    assert [problem.path for problem in raised.value.problems] == ["$.tiers[1].serializer"]


# -- other codecs' frames ------------------------------------------------------------------------------


@attrs.frozen
class AlsoXor(SerializerConfig):
    """Another plugin's, under a name that is taken and with the same options: it decodes otherwise."""

    type: ClassVar[str] = "xor"
    lossless: ClassVar[bool] = True
    mask: int = 1

    def open(self, ctx):
        return Xor(2)


@pytest.mark.parametrize(
    ("wrote", "reads", "error"),
    [
        (XorConfig(1), XorConfig(2), FrameError.CODEC),
        (XorConfig(1), RawConfig(), FrameError.CODEC),
        (RawConfig(), XorConfig(1), FrameError.CODEC),
        (LossyConfig(), XorConfig(1), FrameError.CODEC),
        (XorConfig(1), AlsoXor(), FrameError.DECODED),
    ],
    ids=repr,
)
def test_a_frame_of_another_codec_is_incompatible(wrote, reads, error):
    stored = codec_of(wrote).encode(KEY, sealed())
    assert read(wrote, stored)[0] == PAYLOAD or not wrote.lossless
    assert read(reads, stored)[0] is error
    assert error.incompatible


class Raises(Xor):
    def decode(self, encoded, into):
        raise IndexError("planned")


class Shortens(Xor):
    def decode(self, encoded, into):
        return super().decode(encoded, into) - 1


class Forgets(Xor):
    def decode(self, encoded, into):
        super().decode(encoded, into)


@pytest.mark.parametrize(
    ("serializer", "error"),
    [(Raises, FrameError.UNDECODABLE), (Forgets, FrameError.UNDECODABLE), (Shortens, FrameError.DECODED)],
)
def test_an_error_of_decode_fails_its_frame_alone(monkeypatch, serializer, error):
    stored = codec_of(XorConfig()).encode(KEY, sealed())
    monkeypatch.setattr(XorConfig, "open", lambda self, ctx: serializer(self.mask))
    assert read(XorConfig(), stored)[0] is error


class DisturbedByAnotherThread(Xor):
    """Its encoder shares a buffer, and another thread's payload came in between."""

    def encode(self, payload, into):
        return super().encode(bytes(len(payload)), into)

    def decode(self, encoded, into):
        return super().encode(encoded, into)


class Remembers(Xor):
    """Decodes only what this instance encoded."""

    payload = None

    def encode(self, payload, into):
        self.payload = bytes(payload)
        return len(payload)

    def decode(self, encoded, into):
        into[:] = self.payload
        return len(into)


@pytest.mark.parametrize(
    ("serializer", "error"), [(DisturbedByAnotherThread, FrameError.DECODED), (Remembers, FrameError.UNDECODABLE)]
)
def test_an_encoder_that_breaks_the_contract_serves_nothing(monkeypatch, serializer, error):
    """Though every checksum of the stored bytes fits."""
    monkeypatch.setattr(XorConfig, "open", lambda self, ctx: serializer(self.mask))
    stored = codec_of(XorConfig()).encode(KEY, sealed())
    assert read(XorConfig(), stored)[0] is error


class LooksAtItsViews(UpperBits):
    """And remembers where they began, in encode and decode."""

    seen: ClassVar[list[int]] = []

    def encode(self, payload, into):
        self.seen += [address_of(payload) % FRAME_ALIGNMENT, address_of(into) % FRAME_ALIGNMENT]
        return super().encode(payload, into)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("lossless", [False, True])
def test_views_of_a_stack_are_aligned(tmp_path, monkeypatch, lossless, packed):
    """In slots, in buffers, and where what was packed is unpacked for a serializer."""
    serializer = XorConfig() if lossless else LossyConfig()
    monkeypatch.setattr(type(serializer), "open", lambda self, ctx: LooksAtItsViews(0xFF if lossless else 0xF0))
    monkeypatch.setattr(LooksAtItsViews, "seen", [])
    layout = attrs.evolve(LAYOUT, packed=packed)
    arena = ArenaTierConfig("heap", HeapConfig(), Nbytes(1 << 20))
    codec = {"serializer": serializer, "accept_quality": None if lossless else "unmeasured"}
    disk = StoreTierConfig("disk", DiskConfig(tmp_path, min_free=Nbytes(0)), Nbytes(1 << 20), **codec)
    config, context = StackConfig((arena, disk), layout.tokens), attrs.evolve(CONTEXT, layout=layout)
    with contextlib.closing(open_stack(config, context)) as stack:
        slot = stack.reserve([KEY], "writer")[KEY]
        view = stack.arenas[0].memory.view(slot.index)
        for shard in layout.parts[0].shards if packed else ():
            assert pack(memoryview(bytes(shard.pages_nbytes)), view[shard.offset : shard.offset + shard.nbytes])
        stack.commit("writer")
        stack.drain(HANG)
    with contextlib.closing(open_stack(config, context)) as stack:
        assert stack.lookup([KEY], "reader").pending
        stack.drain(HANG)
        assert stack.lookup([KEY], "reader").slots
        stack.release("reader")
    assert len(LooksAtItsViews.seen) >= 4 and not any(LooksAtItsViews.seen)


# -- lossy codecs --------------------------------------------------------------------------------------


def test_a_slot_decoded_by_a_lossy_codec_is_marked():
    """The frame in the slot is no raw frame to anybody who would store it."""
    stored = codec_of(LossyConfig()).encode(KEY, sealed())
    decoded, slot = read(LossyConfig(), stored)
    assert decoded == bytes(byte & 0xF0 for byte in PAYLOAD)
    assert verify(slot, NAMESPACE, KEY, codec=lossy(RAW)) is None
    for config in (RawConfig(), XorConfig(), LossyConfig()):
        with pytest.raises(ContractError, match="raw after a lossy codec"):
            codec_of(config).encode(KEY, slot)
    assert read(RawConfig(), slot)[0] is FrameError.CODEC, "should it lie in a store all the same"


def test_the_checksum_of_a_lossy_frame_is_of_what_it_decodes_to(monkeypatch):
    """So a decoder that decodes to other bytes than the writer's did is found, though nothing is lossless here."""
    stored = codec_of(LossyConfig()).encode(KEY, sealed())
    assert header_of(stored).decoded_checksum == zlib.crc32(bytes(byte & 0xF0 for byte in PAYLOAD))
    monkeypatch.setattr(LossyConfig, "open", lambda self, ctx: UpperBits(0xE0))
    assert read(LossyConfig(), stored)[0] is FrameError.DECODED


def test_a_frame_that_its_lossy_codec_cannot_decode_is_not_written(monkeypatch):
    monkeypatch.setattr(LossyConfig, "open", lambda self, ctx: Shortens(0))
    with pytest.raises(BackendError, match="decodes its own output to the wrong length"):
        codec_of(LossyConfig()).encode(KEY, sealed())


# -- raw frames ----------------------------------------------------------------------------------------


def test_without_a_serializer_nothing_is_copied_or_read_twice(monkeypatch):
    codec, view, read = codec_of(RawConfig()), sealed(), []
    monkeypatch.setattr("kvtier_core.frames.format.crc32", lambda data: read.append(len(data)) or zlib.crc32(data))
    assert codec.encode(KEY, view).obj is view.obj
    assert codec.read_buffer(view) is view
    assert LAYOUT.payload_nbytes not in read
    assert codec.decode_verified(KEY, view, len(view), view) is None
    assert read.count(LAYOUT.payload_nbytes) == 1


def test_a_slot_that_is_not_sealed_is_not_written():
    with pytest.raises(ContractError, match="not sealed"):
        codec_of(RawConfig()).encode(KEY, memoryview(bytearray(LAYOUT.frame_nbytes)))


def test_another_namespace_has_the_same_codec():
    codec, other = codec_of(XorConfig()), Namespace.of({"model": "other"})
    renewed = codec.with_namespace(other)
    assert (renewed.namespace, renewed.identity) == (other, codec.identity)
    view = sealed()
    assert header_of(renewed.encode(KEY, view)).namespace == other.digest


def test_in_a_shared_store_no_two_codecs_have_a_frame_in_common():
    """Else each of two engines with other options would overwrite what the other one wrote, for ever."""

    def shared(config):
        serializer = config.open(CONTEXT)
        return FrameCodec(NAMESPACE, LAYOUT, serializer, identity_of(config) if serializer else None, shared=True)

    codecs = [shared(config) for config in (RawConfig(), XorConfig(mask=1), XorConfig(mask=2), LossyConfig())]
    assert codecs[0].namespace == NAMESPACE
    assert len({codec.namespace.digest for codec in codecs}) == len(codecs)
    renewed = NAMESPACE.renewed()
    assert len({codec.with_namespace(renewed).namespace.digest for codec in codecs}) == len(codecs)
    slot = memoryview(bytearray(LAYOUT.frame_nbytes))
    stored = codecs[1].encode(KEY, sealed())
    assert codecs[1].decode_verified(KEY, stored, len(stored), slot) is None
    arena = sealed()
    seal_part(arena, NAMESPACE, KEY, LAYOUT.part_of(KEY))
    assert slot == arena, "in the arena it is a frame of the engine's, which any other tier may have"
