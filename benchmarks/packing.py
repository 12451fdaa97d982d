"""What `serializer: packed` makes of KV: how much shorter it is, and how fast it comes and goes, against a copy."""

from __future__ import annotations

import ctypes
import itertools
import mmap
import secrets
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.measure import GIB, Case, Table, interleaved, progress
from benchmarks.models import TRAINED, ModelUnavailable
from kvtier_core import native
from kvtier_core.builtin.packed import bound, pack, unpack
from kvtier_core.testing.samples import address_of
from kvtier_core.types import Nbytes

ROUNDS = 15
REPEATS = 3
NBYTES = 32 << 20
THREADS = (1, 2)
COPY = "memcpy"
ROOT = Path(__file__).parents[1]
#: Texts of which a model computes the KV.
TEXTS = {
    "prose": ["examples/document.md"],
    "documentation": ["docs/architecture.md"],
    "code": ["csrc/crc32.cpp", "csrc/files.cpp", "csrc/table.h"],
}
TOKENS = 1456  # 32 MiB of KV
CHUNK, PAGE = 112, 16  # tokens


def tables(folder: Path) -> Iterator[Table]:
    try:
        payloads = {name: _filled(kv) for name, kv in _kv(TRAINED.checkpoint(folder))}
        source = f"KV that {TRAINED.name} computes in bfloat16 for texts of this repository"
    except ModelUnavailable as error:
        payloads, source = {}, f"{TRAINED.name} is not available: {error}"
    payloads["random bytes"] = _filled(secrets.token_bytes(NBYTES))
    for threads in THREADS:
        progress(f"packing: {threads} threads, {ROUNDS} rounds")
        yield _table(payloads, threads, source)


def _table(payloads: dict[str, memoryview], threads: int, source: str) -> Table:
    with ThreadPoolExecutor(threads) as pool:
        benches = {name: _Bench(payload, threads, pool) for name, payload in payloads.items()}
        copy = next(iter(benches.values())).copy
        times = interleaved([copy, *(case for name in benches for case in benches[name].cases(name))], ROUNDS, REPEATS)
    on = "one thread" if threads == 1 else f"{threads} threads at a time, each with a payload of its own"
    return Table(
        title=f"Packing on {on.partition(' at')[0]}: payloads of {Nbytes(NBYTES)}",
        says=f"`serializer: packed` on {on}, in memory; by {_method()}. {source}, in pages of {PAGE} tokens, keys "
        f"before values. Encoded to memory that is there, and decoded from it; {COPY} copies the payload, at "
        f"{threads * NBYTES / times.median(COPY) / GIB:.1f} GiB/s. Ratios are of speeds in the same round: median (min "
        f"to max) of {ROUNDS} rounds, each the best of {REPEATS}.",
        header=("KV of", "raw to packed", "encoded, of memcpy", "decoded, of memcpy"),
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


def _method() -> str:
    return "Python" if native.extension is None else native.extension.packed_methods()[0]


class _Bench:
    """One payload, which each thread copies, encodes and decodes by itself."""

    def __init__(self, payload: memoryview, threads: int, pool: ThreadPoolExecutor):
        self._payloads = [payload, *(_filled(payload) for _ in range(threads - 1))]
        self._into = [_warm(NBYTES) for _ in range(threads)]
        self._encoded = [_warm(bound(NBYTES)) for _ in range(threads)]
        self._pool = pool
        self.encoded_nbytes = pack(payload, self._encoded[0])
        for encoded, into in zip(self._encoded, self._into, strict=True):
            pack(payload, encoded)
            if not unpack(encoded[: self.encoded_nbytes], into) or into != payload:
                raise RuntimeError("what was packed does not come back")

    @property
    def copy(self) -> Case:
        def work(thread: int) -> None:
            ctypes.memmove(address_of(self._into[thread]), address_of(self._payloads[thread]), NBYTES)

        return Case(COPY, self._on_each_thread(work))

    def cases(self, name: str) -> list[Case]:
        def encode(thread: int) -> None:
            pack(self._payloads[thread], self._encoded[thread])

        def decode(thread: int) -> None:
            unpack(self._encoded[thread][: self.encoded_nbytes], self._into[thread])

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
