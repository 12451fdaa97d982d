"""Codecs side by side: how much shorter KV is, how fast it comes and goes, how soon a hit answers, and how well."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs

from benchmarks import packing, ttft
from benchmarks.bare import must
from benchmarks.engines import BLOCK, Recipe, engines, kvtier, none
from benchmarks.measure import GIB, Spread, Table, Times, progress, scratch, sized, turned
from benchmarks.models import TRAINED, ModelUnavailable
from benchmarks.packing import CHUNK, CHUNKS, CODECS, COPY, CPU_PAGE, GPU_PAGE, KV, NBYTES, RAW, TEXTS, Codec
from benchmarks.stores import redis
from kvtier_core.types import Nbytes
from kvtier_testing.network import Proxy

PROMPTS = sized(6, 1)
AT_ONCE = 3  #: codecs
RATE = 125e6  #: bytes a second: 1 Gbit/s
CONTROL = "no connector"
MEMORY, DISK, REDIS = "cpu", "disk", "redis, 1 Gbit/s"
RANDOM = "random bytes"
HEADER = (
    "",
    *(f"raw to encoded: {name}" for name in (*TEXTS, RANDOM)),
    "chunks in the same room",
    f"encoded, of {COPY}",
    f"decoded, of {COPY}",
    *(f"hit from {place}, times as fast" for place in (MEMORY, DISK, REDIS)),
    "mean KL, nat",
    "top-1 agreement",
    "needles found",
)


def tables(folder: Path) -> Iterator[Table]:
    with scratch(folder) as place, redis(place) as server:
        try:
            checkpoint = TRAINED.checkpoint(place)
        except ModelUnavailable as error:
            yield Table("Codecs", f"Not measured: {TRAINED.name} is not available: {error}.", HEADER, [])
            return
        if server is None:
            yield Table("Codecs", "Not measured: there is no redis-server.", HEADER, [])
            return
        tokens = packing.tokens_of(checkpoint)
        kv = [KV(checkpoint, each) for each in tokens.values()]
        mixed = {page: _mixed([each.payloads(page) for each in kv]) for page in (GPU_PAGE, CPU_PAGE)}
        slots, slot_times = packing.slots(mixed)
        times = packing.encoding_times(mixed[CPU_PAGE])
        payloads = [*(each.payloads(CPU_PAGE) for each in kv), packing.random_payloads()]
        with Proxy(("127.0.0.1", server.port), rate=RATE) as link:
            hits = _Hits(place, checkpoint, list(tokens.values()), server.port, link.port)
            kept, gained = hits.stored(), hits.measured()
    quality = _quality()
    yield Table(
        title="Codecs",
        says=_says(times),
        header=HEADER,
        rows=[
            (
                codec.name,
                *(packing.ratio(codec, each) for each in payloads),
                f"{kept[RAW] / kept[codec]:.2f}",
                *_speeds(codec, times, slot_times),
                *(gained[codec, each] for each in (MEMORY, DISK, REDIS)),
                *quality.get(codec.name, ["-"] * 3),
            )
            for codec in CODECS
        ],
    )
    yield slots


def _says(times: Times) -> str:
    return (
        f"KV that {TRAINED.name} computes in bfloat16 for texts of this repository, in chunks of {CHUNK} tokens, "
        f"{Nbytes(NBYTES)}, and pages as long. *Encoded* and *decoded*, on one thread: {CHUNKS} chunks, of all texts, "
        f"each to a place of its own that is there; {COPY} copies them, at "
        f"{CHUNKS * NBYTES / times.median(COPY) / GIB:.1f} GiB/s. Packing is by {packing.method()}; for slots it is "
        f"part of the copy. Ratios are of speeds in the same round: median (min to max) of {packing.ROUNDS} rounds, "
        f"each the best of {packing.REPEATS}. *Chunks in the same room*: how many times as many the disk of an engine "
        f"holds, by the bytes of its files. *Hits*: real vLLM with that model and one thread, {PROMPTS} prompts of "
        f"{CHUNKS * CHUNK + 1} tokens for each store, of which the last is computed; asked again, they come from cpu. "
        "*Times as fast* is the time to first token of an engine without kvtier, which computes the same prompt in the "
        "same round, over that of the hit: median (min to max). Each codec has one engine over all three places, and "
        f"{AT_ONCE} codecs are compared with one that computes. redis-server is on this machine, behind a proxy in "
        f"user space (`kvtier_testing.network`) that lets {RATE / 1e6:.0f} MB/s pass each way. Quality is that of "
        "[docs/quality.md](../docs/quality.md), not of this run; the other codecs bring back every bit."
    )


def _mixed(texts: Sequence[Sequence[memoryview]]) -> list[memoryview]:
    """As many chunks as one text has, of all of them."""
    return packing.payloads(b"".join(chunk for text in texts for chunk in text[: CHUNKS // len(texts)]))


def _speeds(codec: Codec, times: Times, slots: Times) -> list[object]:
    if codec.serializer is not None:
        return [times.ratio(COPY, f"{codec.name}, {how}") for how in ("encoded", "decoded")]
    if codec == RAW:
        return ["-", "-"]
    return [slots.ratio(f"{COPY}, {CPU_PAGE}", f"{how} packed, {CPU_PAGE}") for how in ("stored", "loaded")]


def _quality() -> dict[str, list[str]]:
    """By codec the figures that docs/quality.md has of `kvtier quality`, without their intervals."""
    told = (packing.ROOT / "docs/quality.md").read_text().partition("## Measured")[2]
    rows = [line.strip("| ").split(" | ") for line in told.splitlines() if line.startswith("| `")]
    return {name: [kl.partition(" [")[0], top1.partition(" [")[0], needles] for name, kl, top1, _, needles, _ in rows}


# -- hits ----------------------------------------------------------------------------------------------


@attrs.frozen
class _Hits:
    """Engines that store the KV of prompts with every codec, and then others that find it."""

    place: Path
    checkpoint: Path
    texts: Sequence[Sequence[int]]
    port: int  #: of the redis-server
    shaped_port: int

    def stored(self) -> dict[Codec, int]:
        """Store all prompts. Returns for each codec the bytes that its disk then holds."""
        kinds = list(itertools.product((DISK, REDIS), ("off", "auto")))
        recipes = [
            kvtier(
                f"{store} below packing: {packed}",
                BLOCK,
                _memory(packed),
                *(self._tier(store, codec, self.port) for codec in CODECS if codec.packing == packed),
            )
            for store, packed in kinds
        ]
        with engines(_small(recipes), self.checkpoint) as started:
            for engine, (store, _) in zip(started, kinds, strict=True):
                progress(f"codecs: storing by {engine.name}")
                for number in range(-1, PROMPTS):
                    engine.ask([self._prompt(store, number)], 1)
        return {codec: sum(file.stat().st_size for file in self._folder(codec).rglob("*.kv")) for codec in CODECS}

    def measured(self) -> dict[tuple[Codec, str], Spread]:
        """How many times as fast as computing a prompt a hit is, for each codec and place."""
        gained: dict[tuple[Codec, str], Spread] = {}
        for first in range(0, len(CODECS), AT_ONCE):
            gained |= self._compared(CODECS[first : first + AT_ONCE])
        return gained

    def _compared(self, codecs: Sequence[Codec]) -> dict[tuple[Codec, str], Spread]:
        recipes = [none(CONTROL)]
        for codec in codecs:
            tiers = [self._tier(store, codec, self.shaped_port) for store in (DISK, REDIS)]
            recipes.append(kvtier(codec.name, BLOCK, _memory(codec.packing), *tiers, load="always", load_wait="1min"))
        gained = defaultdict(list)
        with engines(_small(recipes), self.checkpoint) as started:
            progress(f"codecs: hits, {PROMPTS} prompts for each store")
            for number, store in itertools.product(range(-1, PROMPTS), (DISK, REDIS)):
                asked, seconds = self._prompt(store, number), {}
                for engine in turned(started, number):
                    for place in (store,) if engine.name == CONTROL else (store, MEMORY):
                        answer = engine.ask([asked], 1)
                        must(answer.cached == (0 if engine.name == CONTROL else len(asked) - 1))
                        seconds[engine.name, place] = answer.seconds
                for codec, place in itertools.product(codecs, (store, MEMORY) if number >= 0 else ()):
                    gained[codec, place].append(seconds[CONTROL, store] / seconds[codec.name, place])
        return {case: Spread(tuple(each)) for case, each in gained.items()}

    def _prompt(self, store: str, number: int) -> list[int]:
        """One of the texts behind a token that makes it a prompt of its own."""
        return [10 + (PROMPTS + 1) * (DISK, REDIS).index(store) + number, *self.texts[number % len(self.texts)]]

    def _tier(self, store: str, codec: Codec, port: int) -> dict[str, Any]:
        if store == REDIS:
            return {"type": "redis", "url": f"redis://127.0.0.1:{port}", **codec.settings}
        return {**ttft.disk(self._folder(codec)), **codec.settings}

    def _folder(self, codec: Codec) -> Path:
        return self.place / str(CODECS.index(codec))


def _small(recipes: Sequence[Recipe]) -> list[Recipe]:
    """Several of them fit in memory: the KV cache has room for two prompts. None uses AMX."""
    options = {"kv_cache_memory_bytes": 128 << 20}
    return [attrs.evolve(recipe, options=options, prepare=_without_amx) for recipe in recipes]


def _without_amx() -> None:
    """With it, vLLM keeps bfloat16 in tiles that no codec knows."""
    import torch

    torch.cpu._is_amx_tile_supported = lambda: False


def _memory(packed: str) -> dict[str, str]:
    return {"type": "cpu", "capacity": "128MiB", "packing": packed}
