"""What lossless codecs make of KV, in slots and in stores: how much shorter it is, and how fast it comes and goes."""

from __future__ import annotations

import ctypes
import itertools
import mmap
import random
import secrets
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import attrs

from benchmarks.measure import GIB, Case, Table, interleaved, progress
from benchmarks.models import TRAINED, ModelUnavailable
from kvtier_core import native
from kvtier_core.builtin.packed import PackedConfig
from kvtier_core.builtin.zstd import ZstdConfig
from kvtier_core.interfaces import Serializer
from kvtier_core.packed_form import PackedForm, packed_nbytes
from kvtier_core.testing.samples import address_of, make_context, make_layout
from kvtier_core.transfer.copier import Copier
from kvtier_core.transfer.packing import bound, pack
from kvtier_core.transfer.page_lists import Layer
from kvtier_core.types import Nbytes

ROUNDS = 15
REPEATS = 3
NBYTES = 32 << 20
THREADS = (1, 2)
COPY = "memcpy"
CODECS: tuple[PackedConfig | ZstdConfig, ...] = (PackedConfig(), ZstdConfig())
BYTES = make_layout((NBYTES,), blocks=1)
LAYOUT = attrs.evolve(BYTES, groups=(attrs.evolve(BYTES.groups[0], dtype="bfloat16"),))  # type: ignore[arg-type]
ROOT = Path(__file__).parents[1]
#: Texts of which a model computes the KV.
TEXTS = {
    "prose": ["examples/document.md"],
    "documentation": ["docs/architecture.md"],
    "code": ["csrc/crc32.cpp", "csrc/files.cpp", "csrc/table.h"],
}
TOKENS = 1456  # 32 MiB of KV
CHUNK, PAGE = 112, 16  # tokens
LAYERS, PAGE_NBYTES = 30, 12 << 10  #: of that model, keys and values


def tables(folder: Path) -> Iterator[Table]:
    try:
        payloads = {name: _filled(kv) for name, kv in _kv(TRAINED.checkpoint(folder))}
        source = f"KV that {TRAINED.name} computes in bfloat16 for texts of this repository"
    except ModelUnavailable as error:
        payloads, source = {}, f"{TRAINED.name} is not available: {error}"
    payloads["random bytes"] = _filled(secrets.token_bytes(NBYTES))
    for codec, threads in itertools.product(CODECS, THREADS):
        progress(f"packing: {codec.type}, {threads} threads, {ROUNDS} rounds")
        yield _table(codec, payloads, threads, source)
    progress(f"packing: slots, {ROUNDS} rounds")
    yield _slots(payloads, source)


def _table(codec: PackedConfig | ZstdConfig, payloads: dict[str, memoryview], threads: int, source: str) -> Table:
    serializer = codec.open(make_context(layout=LAYOUT))
    with ThreadPoolExecutor(threads) as pool:
        benches = {name: _Bench(serializer, payload, threads, pool) for name, payload in payloads.items()}
        copy = next(iter(benches.values())).copy
        times = interleaved([copy, *(case for name in benches for case in benches[name].cases(name))], ROUNDS, REPEATS)
    on = "one thread" if threads == 1 else f"{threads} threads at a time, each with a payload of its own"
    return Table(
        title=f"`serializer: {codec.type}` on {on.partition(' at')[0]}: payloads of {Nbytes(NBYTES)}",
        says=f"On {on}, in memory; packed by {_method()}. {source}, in pages of {PAGE} tokens, keys "
        f"before values. Encoded to memory that is there, and decoded from it; {COPY} copies the payload, at "
        f"{threads * NBYTES / times.median(COPY) / GIB:.1f} GiB/s. Ratios are of speeds in the same round: median (min "
        f"to max) of {ROUNDS} rounds, each the best of {REPEATS}.",
        header=("KV of", "raw to encoded", "encoded, of memcpy", "decoded, of memcpy"),
        rows=[
            (
                name,
                f"{NBYTES / bench.encoded_nbytes:.3f}",
                times.ratio(COPY, f"{name}, encoded"),
                times.ratio(COPY, f"{name}, decoded"),
            )
            for name, bench in benches.items()
        ],
    )


def _slots(payloads: dict[str, memoryview], source: str) -> Table:
    """Stores and loads of an arena that packs, and of one that does not, between pages in any order and slots."""
    slots = {name: _Slots(payload) for name, payload in payloads.items() if name != "random bytes"}
    times = interleaved([case for name in slots for case in slots[name].cases(name)], ROUNDS, REPEATS)
    return Table(
        title=f"Packed slots: stores and loads of {Nbytes(NBYTES)}",
        says=f"{source}, in pages of {Nbytes(PAGE_NBYTES)} in any order, to a slot and back on one thread, by the "
        f"copier of `cpu` tiers, whose stores sum what they write; by {_method()}. {COPY} copies as many bytes. "
        f"Ratios are of speeds in the same round: median (min to max) of {ROUNDS} rounds, each the best of {REPEATS}. "
        f"A slot has room for one raw tile in sixteen; the last column is the most of a chunk of {CHUNK} tokens.",
        header=("KV of", "raw to packed slot", *(f"{how}, of {COPY}" for how in _Slots.HOW), "raw tiles of a chunk"),
        rows=[
            (
                name,
                f"{NBYTES / packed_nbytes(NBYTES):.3f}",
                *(times.ratio(f"{name}, {COPY}", f"{name}, {how}") for how in _Slots.HOW),
                f"{each.raw_tiles:.2%}",
            )
            for name, each in slots.items()
        ],
    )


class _Slots:
    """Pages with the content of a payload, and a slot of each kind."""

    HOW = ("stored raw", "stored packed", "loaded raw", "loaded packed")

    def __init__(self, payload: memoryview):
        self._pages, self._slots = payload, (_warm(NBYTES), _warm(NBYTES))
        self._row = random.Random(0).sample(range(NBYTES // PAGE_NBYTES), NBYTES // PAGE_NBYTES)
        layers = [Layer(address_of(payload), PAGE_NBYTES, PAGE_NBYTES, 0, 0, len(self._row))]
        raw, packed = map(address_of, self._slots)
        self._raw = Copier(layers, raw, NBYTES)
        self._packed = Copier(layers, packed, NBYTES, packed_nbytes(len(self._row) * PAGE_NBYTES))
        self.raw_tiles = max(map(_raw_tiles, _chunks(payload)))
        if None in self._packed.gather([self._row], [0]) or not self._packed.scatter([self._row], [0]):
            raise RuntimeError("the pages have no room in a packed slot")

    def cases(self, name: str) -> list[Case]:
        row, slot, into = [self._row], [0], _warm(NBYTES)
        copy = Case(f"{name}, {COPY}", lambda: ctypes.memmove(address_of(into), address_of(self._pages), NBYTES))
        work = [
            lambda: self._raw.gather(row, slot),
            lambda: self._packed.gather(row, slot),
            lambda: self._raw.scatter(row, slot),
            lambda: self._packed.scatter(row, slot),
        ]
        return [copy, *(Case(f"{name}, {how}", each) for how, each in zip(self.HOW, work, strict=True))]


def _chunks(payload: memoryview) -> list[memoryview]:
    nbytes = CHUNK // PAGE * PAGE_NBYTES * LAYERS
    return [payload[begin : begin + nbytes] for begin in range(0, NBYTES - nbytes + 1, nbytes)]


def _raw_tiles(chunk: memoryview) -> float:
    """The share of its tiles that do not pack."""
    into, form = memoryview(bytearray(bound(len(chunk)))), PackedForm.of(len(chunk))
    return (pack(chunk, into) - form.ends) / (form.values / 2)


def _method() -> str:
    return "Python" if native.extension is None else native.extension.packed_methods()[0]


class _Bench:
    """One payload, which each thread copies, encodes and decodes by itself."""

    def __init__(self, serializer: Serializer, payload: memoryview, threads: int, pool: ThreadPoolExecutor):
        self._serializer = serializer
        self._payloads = [payload, *(_filled(payload) for _ in range(threads - 1))]
        self._into = [_warm(NBYTES) for _ in range(threads)]
        self._encoded = [_warm(serializer.bound(LAYOUT)) for _ in range(threads)]
        self._pool = pool
        for encoded, into in zip(self._encoded, self._into, strict=True):
            self.encoded_nbytes = serializer.encode(payload, encoded)
            serializer.decode(encoded[: self.encoded_nbytes], into)
            if into != payload:
                raise RuntimeError("what was encoded does not come back")

    @property
    def copy(self) -> Case:
        def work(thread: int) -> None:
            ctypes.memmove(address_of(self._into[thread]), address_of(self._payloads[thread]), NBYTES)

        return Case(COPY, self._on_each_thread(work))

    def cases(self, name: str) -> list[Case]:
        def encode(thread: int) -> None:
            self._serializer.encode(self._payloads[thread], self._encoded[thread])

        def decode(thread: int) -> None:
            self._serializer.decode(self._encoded[thread][: self.encoded_nbytes], self._into[thread])

        return [
            Case(f"{name}, encoded", self._on_each_thread(encode)),
            Case(f"{name}, decoded", self._on_each_thread(decode)),
        ]

    def _on_each_thread(self, work: Callable[[int], None]) -> Callable[[], object]:
        if len(self._payloads) == 1:
            return lambda: work(0)
        return lambda: list(self._pool.map(work, range(len(self._payloads))))


def _warm(nbytes: int) -> memoryview:
    view = memoryview(mmap.mmap(-1, nbytes))
    view[:] = b"\1" * nbytes
    return view


def _filled(content: bytes | memoryview) -> memoryview:
    """As many bytes as a payload has: this content, again and again."""
    view = _warm(NBYTES)
    for begin in range(0, NBYTES, len(content)):
        part = content[: NBYTES - begin]
        view[begin : begin + len(part)] = part
    return view


def _kv(checkpoint: Path) -> Iterator[tuple[str, bytes]]:
    """Of each text the KV, chunk after chunk; in a chunk layer after layer, page after page."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16)
    for name, files in TEXTS.items():
        progress(f"packing: the KV of {name}")
        text = "\n".join((ROOT / file).read_text() for file in files)
        with torch.no_grad():
            cache = model.model(tokenizer(text, return_tensors="pt").input_ids[:, :TOKENS]).past_key_values
        pages = []
        for chunk in range(0, cache.get_seq_length() // CHUNK * CHUNK, CHUNK):
            for layer, begin in itertools.product(cache.layers, range(chunk, chunk + CHUNK, PAGE)):
                for each in (layer.keys[0], layer.values[0]):  # by head, token and channel
                    page = each[:, begin : begin + PAGE].transpose(0, 1).contiguous()
                    pages.append(page.view(torch.int16).numpy().tobytes())
        yield name, b"".join(pages)
