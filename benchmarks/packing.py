"""What codecs make of KV in memory, in payloads for stores and in slots: how much shorter it is, and how fast."""

from __future__ import annotations

import ctypes
import itertools
import mmap
import random
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from benchmarks.bare import must
from benchmarks.engines import BLOCK
from benchmarks.measure import Case, Table, Times, interleaved, progress, sized
from kvtier_core import native
from kvtier_core.builtin.packed import PackedConfig
from kvtier_core.builtin.zstd import ZstdConfig
from kvtier_core.interfaces import SerializerConfig
from kvtier_core.layouts import ChunkLayout, Elements, KVGroup, KVKind, KVStructure
from kvtier_core.packed_form import PackedForm, packed_nbytes
from kvtier_core.transfer.copier import Copier
from kvtier_core.transfer.packing import bound, pack
from kvtier_core.transfer.page_lists import Layer
from kvtier_core.types import Nbytes
from kvtier_lossy.config import CachegenConfig, Fp8Config, Int8Config, KiviConfig
from kvtier_testing.samples import address_of, make_context

ROUNDS, REPEATS = sized((11, 3), (1, 1))
COPY = "memcpy"
ROOT = Path(__file__).parents[1]
#: Texts of which the model computes the KV.
TEXTS = {
    "prose": ["examples/document.md", "plugins/kvtier_vllm/kvtier_vllm/quality/texts/prose.txt"],
    "documentation": ["docs/architecture.md"],
    "code": ["csrc/crc32.cpp", "csrc/files.cpp", "csrc/table.h"],
}
LAYERS, HEADS, CHANNELS = 30, 3, 64  #: of the model
TOKEN_NBYTES = 2 * HEADS * CHANNELS * 2  #: of a layer
CHUNK, CHUNKS = BLOCK, sized(12, 3)  #: tokens of a chunk, chunks of a text
NBYTES = LAYERS * CHUNK * TOKEN_NBYTES  #: of a payload
CPU_PAGE, GPU_PAGE = BLOCK, 16  #: tokens of a page, as vLLM has them by default


@attrs.frozen
class Codec:
    """What the table has a row of."""

    name: str
    serializer: SerializerConfig | None = None  #: of a store tier
    packing: str = "off"  #: of the arena above it

    @property
    def settings(self) -> dict[str, Any]:
        """Of a store tier."""
        if self.serializer is None:
            return {}
        chosen = {"serializer": {"type": self.serializer.type, **attrs.asdict(self.serializer)}}
        return chosen if self.serializer.lossless else {**chosen, "accept_quality": "unmeasured"}


RAW = Codec("`raw`")
CODECS = (
    RAW,
    Codec("`packing: auto`", packing="auto"),
    Codec("`packed`", PackedConfig()),
    Codec("`zstd`", ZstdConfig()),
    Codec("`fp8`", Fp8Config()),
    Codec("`int8`", Int8Config()),
    Codec("`kivi`", KiviConfig()),
    Codec("`kivi`, `bits: 2`", KiviConfig(bits=2)),
    Codec("`cachegen`", CachegenConfig()),
)


# -- KV ------------------------------------------------------------------------------------------------


def tokens_of(checkpoint: Path) -> dict[str, list[int]]:
    """The first chunks of each text."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    texts = {name: "\n".join((ROOT / file).read_text() for file in files) for name, files in TEXTS.items()}
    return {name: tokenizer(text).input_ids[: CHUNKS * CHUNK] for name, text in texts.items()}


class KV:
    """The KV that the model computes for tokens."""

    def __init__(self, checkpoint: Path, tokens: Sequence[int]):
        import torch
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16)
        with torch.no_grad():
            self._layers = model.model(torch.tensor([tokens])).past_key_values.layers

    def payloads(self, page: int) -> list[memoryview]:
        """The payload of each chunk, in pages of ``page`` tokens, in the order of `layout`."""
        import torch

        pages = []
        for chunk in range(0, CHUNKS * CHUNK, CHUNK):
            for layer, begin in itertools.product(self._layers, range(chunk, chunk + CHUNK, page)):
                keys, values = (each[0, :, begin : begin + page] for each in (layer.keys, layer.values))
                both = torch.stack([keys.transpose(1, 2).flatten(1), values.flatten(1)], dim=1)
                pages.append(both.view(torch.int16).numpy().tobytes())
        return payloads(b"".join(pages))


def layout(page: int) -> ChunkLayout:
    """Of chunks as vLLM has them on a CPU: of each head all keys, channel after channel, then all values, token after
    token.
    """
    half = page * CHANNELS
    keys = Elements(HEADS, page, CHANNELS, first=0, of_head=2 * half, of_token=1, of_channel=page)
    values = Elements(HEADS, page, CHANNELS, first=half, of_head=2 * half, of_token=CHANNELS, of_channel=1)
    group = KVGroup(
        name="group 0",
        kind=KVKind.FULL_ATTENTION,
        page_nbytes=[page * TOKEN_NBYTES] * LAYERS,
        block_tokens=page,
        dtype="bfloat16",
        structure=KVStructure.KEYS_AND_VALUES,
        elements=(keys, values),
        depths=range(LAYERS),
    )
    return ChunkLayout([group], CHUNK)


def payloads(content: bytes) -> list[memoryview]:
    """Side by side in memory."""
    view = _warm(len(content))
    view[:] = content
    return [view[begin : begin + NBYTES] for begin in range(0, len(content), NBYTES)]


def random_payloads() -> list[memoryview]:
    return payloads(secrets.token_bytes(NBYTES))


def _warm(nbytes: int) -> memoryview:
    view = memoryview(mmap.mmap(-1, nbytes))
    view[:] = b"\1" * nbytes
    return view


# -- payloads for stores -------------------------------------------------------------------------------


class Encoding:
    """Payloads that a serializer encodes and decodes, one after the other, each in a place of its own."""

    def __init__(self, serializer: SerializerConfig, of: Sequence[memoryview]):
        chunks = layout(CPU_PAGE)
        opened = serializer.open(make_context(layout=chunks))
        assert opened is not None
        self._serializer, self._payloads = opened, of
        self._encoded = [_warm(opened.bound(chunks)) for _ in of]
        self._into = [_warm(NBYTES) for _ in of]
        self.encode()
        self.decode()
        must(not serializer.lossless or self._into == list(of))

    def encode(self) -> None:
        pairs = zip(self._payloads, self._encoded, strict=True)
        self._nbytes = [self._serializer.encode(payload, into) for payload, into in pairs]

    def decode(self) -> None:
        for encoded, nbytes, into in zip(self._encoded, self._nbytes, self._into, strict=True):
            self._serializer.decode(encoded[:nbytes], into)

    @property
    def ratio(self) -> float:
        """How many times shorter the payloads are."""
        return NBYTES * len(self._payloads) / sum(self._nbytes)


def ratio(codec: Codec, of: Sequence[memoryview]) -> str:
    """How many times shorter these payloads become in a store, or in packed slots, in words."""
    if codec.serializer is not None:
        return f"{Encoding(codec.serializer, of).ratio:.3f}"
    if codec.packing == "off":
        return "1"
    slot = _warm(packed_nbytes(NBYTES))
    return f"{NBYTES / len(slot):.3f}" if all(pack(payload, slot) for payload in of) else "not stored"


def encoding_times(of: Sequence[memoryview]) -> Times:
    """Of each codec the cases ``NAME, encoded`` and ``NAME, decoded``, and a copy of the payloads."""
    into = [_warm(NBYTES) for _ in of]

    def copy() -> None:
        for payload, place in zip(of, into, strict=True):
            ctypes.memmove(address_of(place), address_of(payload), NBYTES)

    cases = [Case(COPY, copy)]
    for codec in CODECS:
        if codec.serializer is not None:
            encoding = Encoding(codec.serializer, of)
            cases.append(Case(f"{codec.name}, encoded", encoding.encode))
            cases.append(Case(f"{codec.name}, decoded", encoding.decode))
    progress(f"codecs: {len(cases)} cases, {ROUNDS} rounds")
    return interleaved(cases, ROUNDS, REPEATS)


# -- packed slots --------------------------------------------------------------------------------------

HOW = ("stored raw", "stored packed", "loaded raw", "loaded packed")


def slots(of: Mapping[int, Sequence[memoryview]]) -> tuple[Table, Times]:
    """Stores and loads of arenas, by tokens of a page. The cases are ``HOW, NBYTES`` with the bytes of a page."""
    progress(f"codecs: slots, {ROUNDS} rounds")
    times = interleaved([case for page, chunks in of.items() for case in _Slots(page, chunks).cases()], ROUNDS, REPEATS)
    table = Table(
        title="Packed slots",
        says=f"Of the same KV {CHUNKS} chunks of {CHUNK} tokens, to slots and back on one thread, between pages in any "
        f"order of {LAYERS} layers, by the copier of `cpu` tiers, whose stores sum what they write; by {method()}. "
        f"{COPY} copies as many bytes. Ratios are of speeds in the same round: median (min to max) of {ROUNDS} rounds, "
        f"each the best of {REPEATS}. A slot has room for one raw tile in sixteen; the last column is the most of a "
        "chunk.",
        header=("pages of", *(f"{how}, of {COPY}" for how in HOW), "raw tiles of a chunk"),
        rows=[
            (
                page_size(page),
                *(times.ratio(f"{COPY}, {page}", f"{how}, {page}") for how in HOW),
                f"{max(map(_raw_tiles, chunks)):.2%}",
            )
            for page, chunks in of.items()
        ],
    )
    return table, times


class _Slots:
    """The pages of an engine, and slots of each kind for their chunks."""

    def __init__(self, page: int, of: Sequence[memoryview]):
        blocks, nbytes = CHUNK // page, page * TOKEN_NBYTES
        ids = random.Random(0).sample(range(len(of) * blocks), len(of) * blocks)
        self._page, self._payloads, self._pages = page, of, _warm(len(of) * NBYTES)
        self._packed_slots = _warm(len(of) * packed_nbytes(NBYTES))
        self._rows = [ids[begin : begin + blocks] for begin in range(0, len(ids), blocks)]
        first = address_of(self._pages)
        layers = [
            Layer(first + layer * len(ids) * nbytes, nbytes, nbytes, layer * blocks * nbytes, 0, blocks)
            for layer in range(LAYERS)
        ]
        self._raw = Copier(layers, address_of(of[0]), NBYTES)
        shard = packed_nbytes(NBYTES)
        self._packed = Copier(layers, address_of(self._packed_slots), shard, shard)
        rows, numbers = self._rows, range(len(of))
        must(self._raw.scatter(rows, numbers))
        must(None not in self._packed.gather(rows, numbers) and self._packed.scatter(rows, numbers))

    def cases(self) -> list[Case]:
        rows, numbers, pages = self._rows, range(len(self._rows)), self._pages
        into = _warm(len(pages))
        work = {
            COPY: lambda: ctypes.memmove(address_of(into), address_of(pages), len(pages)),
            "stored raw": lambda: self._raw.gather(rows, numbers),
            "stored packed": lambda: self._packed.gather(rows, numbers),
            "loaded raw": lambda: self._raw.scatter(rows, numbers),
            "loaded packed": lambda: self._packed.scatter(rows, numbers),
        }
        return [Case(f"{name}, {self._page}", each) for name, each in work.items()]


def _raw_tiles(chunk: memoryview) -> float:
    """The share of its tiles that do not pack."""
    into, form = memoryview(bytearray(bound(len(chunk)))), PackedForm.of(len(chunk))
    return (pack(chunk, into) - form.ends) / (form.values / 2)


def page_size(page: int) -> Nbytes:
    """Bytes of ``page`` tokens in one layer."""
    return Nbytes(page * TOKEN_NBYTES)


def method() -> str:
    """How this machine packs."""
    return "Python" if native.extension is None else native.extension.packed_methods()[0]
