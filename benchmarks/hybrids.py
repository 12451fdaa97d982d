"""Models whose layers need different parts of a prefix: what is stored of each group, and what a hit costs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from benchmarks.engines import BLOCK, Recipe, kvtier, none, prefix_cache
from benchmarks.measure import Table, scratch, sized
from benchmarks.models import HYBRID
from benchmarks.ttft import CONTROL, Tiers, Workload, measure
from kvtier_core.engine.scheduler.boundaries import Boundaries
from kvtier_core.layouts import ChunkLayout, KVGroup, KVKind, KVStructure

TOKENS = 32 << 10  #: of the prompt of which bytes are counted
PROMPTS, WARMING = sized((12, 3), (1, 0))


def _group(kind: KVKind, layers: int, block_nbytes: int, block_tokens: int, reach: int = 0) -> KVGroup:
    """Layers of one kind, of which vLLM may make several groups; the bytes are the same."""
    name = f"{layers} layers, {kind}" + (f" of {reach}" if reach else "")
    pages = (block_nbytes,) * layers
    what = KVStructure.KEYS_AND_VALUES
    return KVGroup(name, kind, pages, block_tokens, "bfloat16", what, reach)


#: Chunks and groups of models as they are published, in bfloat16, with the blocks that vLLM makes for a GPU: of 16
#: tokens, and with recurrent states so long that the attention of one layer takes as much as a state.
_MODELS = {
    "Gemma 3 27B": (
        256,
        [
            _group(KVKind.FULL_ATTENTION, 10, 16 * 8192, 16),
            _group(KVKind.SLIDING_WINDOW, 52, 16 * 8192, 16, 1024),
        ],
    ),
    "gpt-oss-120b": (
        256,
        [
            _group(KVKind.FULL_ATTENTION, 18, 16 * 2048, 16),
            _group(KVKind.SLIDING_WINDOW, 18, 16 * 2048, 16, 128),
        ],
    ),
    "Llama 4 Scout": (
        256,
        [
            _group(KVKind.FULL_ATTENTION, 12, 16 * 4096, 16),
            _group(KVKind.CHUNKED_LOCAL, 36, 16 * 4096, 16, 8192),
        ],
    ),
    "Qwen3-Next 80B": (
        544,
        [
            _group(KVKind.FULL_ATTENTION, 12, 544 * 2048, 544),
            _group(KVKind.STATE, 36, 32 * 128 * 128 * 2 + 3 * 8192 * 2, 544),
        ],
    ),
}


def tables(folder: Path) -> Iterator[Table]:
    """Counts the bytes of published models, and measures a small one."""
    yield _bytes()
    workload = Workload("Time to first token, windows", HYBRID, PROMPTS, WARMING, _recipes)
    with scratch(folder) as place:
        yield measure(workload, place)


def _bytes() -> Table:
    rows: list[list[object]] = []
    for model, (chunk_tokens, groups) in _MODELS.items():
        layout = ChunkLayout(groups, chunk_tokens)
        stored = _stored(layout)
        for part in layout.parts:
            (group,) = (groups[number] for number in part.groups)
            every = 0 if group.kind is KVKind.STATE else sum(group.page_nbytes) / group.block_tokens
            share = f"{stored[part.number] / TOKENS / every:.2f}" if every else "-"
            rows.append([model, group.name, f"{stored[part.number] / TOKENS * 1000 / 1e6:.1f}", share])
    return Table(
        "Bytes of groups",
        f"Computed from the shapes of published models in bfloat16, not measured: payloads of a prompt of {TOKENS} "
        "tokens, in chunks of 256 (Qwen3-Next: 544), with all boundaries that are stored of it in any case. States are "
        "stored where vLLM keeps them, here at the end of the prompt. *Of all* is the share of what these layers would "
        "take if the KV of every token were stored.",
        ("model", "group", "MB per 1000 tokens", "of all"),
        rows,
    )


def _stored(layout: ChunkLayout) -> list[int]:
    """Bytes of the payloads of each part that are stored of a prompt."""
    chunks = TOKENS // layout.tokens
    states = {number: 0 for number, group in enumerate(layout.groups) if group.kind is KVKind.STATE}
    boundaries = Boundaries(layout).among(0, chunks, {chunks}, {chunks * layout.tokens: states})
    parts = [set(range(chunks))]
    parts += [{number for end in boundaries for number in layout.needed(part, end)} for part in layout.parts[1:]]
    return [len(numbers) * part.payload_nbytes for numbers, part in zip(parts, layout.parts, strict=True)]


def _recipes(place: Path, shared: Tiers) -> list[Recipe]:
    memory = {"type": "cpu", "capacity": "512MiB"}
    small = {"type": "cpu", "capacity": "8MiB"}  # two prompts: the second pass finds nothing there
    disk = {"type": "disk", "path": str(place / "disk"), "capacity": "4GiB", "min_free": "0B"}
    return [
        none(CONTROL),
        none("no connector, once more"),
        prefix_cache(),
        kvtier("kvtier, cpu", 2 * BLOCK, memory),
        kvtier("kvtier, hits from disk", 2 * BLOCK, small, disk),
    ]
