"""Hits of real vLLM engines with the offloading of others, from its own tier for files and from kvtier's disk."""

from __future__ import annotations

import contextlib
import functools
import json
import sys
from pathlib import Path

import attrs

from benchmarks.engines import BLOCK, Recipe, kvtier, none, prefix_cache
from benchmarks.measure import Table, sized
from benchmarks.models import TRAINED
from benchmarks.ttft import CONTROL, Tiers, Workload, disk, measure

_ROOT = Path(__file__).parents[1]
_OURS = json.loads((_ROOT / "examples/hosts/vllm.json").read_text())
#: Bytes of memory above a store. It has room for two prompts, of which the second pass finds none.
_MEMORY = 176 << 20
_PROMPTS, _WARMING = sized((6, 1), (1, 0))
#: GiB of an LMCache server. It evicts from time to time, and needs room meanwhile; the second pass finds nothing.
_LMCACHE_MEMORY = 0.5


def table(place: Path) -> Table:
    """A prompt that was seen before, and is in a store below vLLM's memory."""
    sys.path.append(str(_ROOT / "plugins/kvtier_vllm/tests"))  # for `on_the_cpu`, also in the engines' processes
    title = "Time to first token in vLLM's own offloading, trained model"
    timed = measure(Workload(title, TRAINED, prompts=_PROMPTS, warming=_WARMING, recipes=_recipes), place)
    copies = "The copies of a worker with a GPU are not vLLM's here: they are made at once, in memory."
    return attrs.evolve(timed, says=f"{timed.says} {copies}")


def lmcache_table(place: Path) -> Table:
    """The same below the memory of LMCache's server, whose packages and tests are importable."""
    title = "Time to first token with LMCache's server, trained model"
    with contextlib.ExitStack() as closing:
        recipes = functools.partial(_lmcache_recipes, closing)
        timed = measure(Workload(title, TRAINED, prompts=_PROMPTS, warming=_WARMING, recipes=recipes), place)
    return attrs.evolve(timed, says=f"{timed.says} Each engine with LMCache's connector has a server of its own.")


def _lmcache_recipes(closing: contextlib.ExitStack, place: Path, shared: Tiers) -> list[Recipe]:
    from servers.lmcache import LMCacheServer, hide_what_vllm_cannot_search

    model = str(TRAINED.checkpoint(place))
    small = {"type": "cpu", "capacity": f"{_MEMORY}B"}
    below = {"version": 1, "load_wait": "20s", "tiers": [small, disk(place / "below")]}
    spec = json.loads((_ROOT / "examples/hosts/lmcache.json").read_text())
    adapters = {
        "its `fs` adapter": {"type": "fs", "base_path": str(place / "fs"), "use_odirect": True},
        "kvtier's disk": {**spec, "adapter_params": {"config": below, "models": {model: model}}},
    }
    recipes = [none(CONTROL), prefix_cache()]
    for name, adapter in adapters.items():
        folder = place / f"server-{len(recipes)}"
        folder.mkdir()
        server = LMCacheServer(folder, adapter, chunk_tokens=BLOCK, memory=_LMCACHE_MEMORY)
        closing.callback(server.close)
        recipes.append(Recipe(f"LMCache, hits from {name}", server.connector, prepare=hide_what_vllm_cannot_search))
    return [*recipes, kvtier("kvtier, hits from disk", BLOCK, small, disk(place / "own"))]


def _recipes(place: Path, shared: Tiers) -> list[Recipe]:
    small = {"type": "cpu", "capacity": f"{_MEMORY}B"}
    (ours,) = _OURS["kv_connector_extra_config"]["secondary_tiers"]
    below = {"version": 1, "load_wait": "20s", "tiers": [small, disk(place / "below")]}
    return [
        none(CONTROL),
        prefix_cache(),
        _offloading("vLLM's offloading, hits from its fs tier", {"type": "fs", "root_dir": str(place / "fs")}),
        _offloading("vLLM's offloading, hits from kvtier's disk", {**ours, "config": below}),
        kvtier("kvtier, hits from disk", BLOCK, small, disk(place / "own")),
    ]


def _offloading(name: str, tier: dict[str, object]) -> Recipe:
    extra = {"spec_name": "TieringOnTheCPU", "spec_module_path": "on_the_cpu", "cpu_bytes_to_use": _MEMORY}
    return Recipe(
        name, {**_OURS, "kv_connector_extra_config": {**extra, "blocks_per_chunk": 1, "secondary_tiers": [tier]}}
    )
