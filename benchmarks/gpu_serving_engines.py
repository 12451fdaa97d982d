"""The engines of `benchmarks.gpu_serving`: the shape of their model, its weights, and what they are given."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import attrs

from benchmarks.engines import CPU, Engine, Hardware, Recipe, engines, kvtier
from benchmarks.measure import GIB, sized
from kvtier_core.types import Nbytes

#: In the environment: options of vLLM's LLM as JSON, for all engines.
OPTIONS = "KVTIER_SERVING_OPTIONS"
_LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "attention_bias": False,
    "mlp_bias": False,
    "dtype": "bfloat16",
}
_SMALL = _LLAMA_8B | {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 2048,
    "max_position_embeddings": 8192,
}


@attrs.frozen
class Scale:
    """The shape of the model, and the load of the sections."""

    shape: Mapping[str, Any]  #: the configuration of a checkpoint
    tokens: Sequence[int]  #: of prompts, but for the last ones that are no whole block
    rounds: int  #: see `rounds_of`
    batch: tuple[int, int, int]  #: without reuse: prompts at once, tokens of each, tokens of each answer
    memory: str
    disk: str
    min_free: str  #: on the disk
    kv_nbytes: int  #: of KV cache in each engine

    def rounds_of(self, tokens: int) -> int:
        """Of prompts of this length: long ones are expensive."""
        return self.rounds if tokens < 20_000 else min(self.rounds, 2)

    @property
    def token_nbytes(self) -> int:
        """The KV of a token: a key and a value, two bytes an element."""
        return 4 * self.shape["num_hidden_layers"] * self.shape["num_key_value_heads"] * self.shape["head_dim"]


SMALL = Scale(_SMALL, (512, 1024), 1, (2, 128, 8), "256MiB", "512MiB", "0B", 128 << 20)
SCALE = sized(Scale(_LLAMA_8B, (2048, 8192, 32768), 4, (16, 1024, 64), "24GiB", "40GiB", "4GiB", 10 * GIB), SMALL)


class Place:
    """The folder that all sections of a run share, and the engines that they start there."""

    def __init__(self, folder: Path, scale: Scale = SCALE):
        self.folder, self.scale = folder, scale
        self.model = folder / f"llama-{scale.shape['num_hidden_layers']}"
        self.model.mkdir(parents=True, exist_ok=True)
        (self.model / "config.json").write_text(json.dumps(dict(scale.shape)))
        self.answers = folder / "answers.json"  #: of the engine's own hits, and how far they differ by themselves

    def engines(self, *recipes: Recipe, model: Path | None = None) -> AbstractContextManager[list[Engine]]:
        return engines([self._here(recipe) for recipe in recipes], model or self.model, _hardware())

    def kvtier(self, name: str, *below: dict[str, Any], packing: str = "off", **options: Any) -> Recipe:
        memory = {"type": "cpu", "capacity": self.scale.memory, "packing": packing}
        return attrs.evolve(kvtier(name, None, memory, *below, load="always", load_wait="60s"), options=options)

    def disk(self) -> dict[str, Any]:
        """A tier on the disk of the folder."""
        room = {"capacity": self.scale.disk, "min_free": self.scale.min_free}
        return {"type": "disk", "path": str(self.folder / "disk"), **room}

    def offloading(self) -> Recipe:
        """vLLM's own connector, with as much memory."""
        extra: dict[str, Any] = {"cpu_bytes_to_use": int(Nbytes.parse(self.scale.memory))}
        if not on_gpu():  # vLLM's copies need one; those of the tests do not
            extra |= {"spec_name": "TieringOnTheCPU", "spec_module_path": "on_the_cpu"}
        transfer = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
        return Recipe("vLLM's OffloadingConnector", transfer)

    def _here(self, recipe: Recipe) -> Recipe:
        # Engines that start at once do not write to one cache; a later one finds what an earlier one has compiled.
        cache = {"VLLM_CACHE_ROOT": str(self.folder / "compiled" / recipe.name)}
        options = {"kv_cache_memory_bytes": self.scale.kv_nbytes, **recipe.options}
        return attrs.evolve(recipe, options=options, environment={**cache, **recipe.environment}, prepare=scale_weights)


@functools.cache
def on_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


@functools.cache
def _hardware() -> Hardware:
    """A GPU, as vLLM uses it by default; or the CPU, where all of this can be tried."""
    options = {"load_format": "dummy", "dtype": "bfloat16", "skip_tokenizer_init": True, "seed": 0, "max_num_seqs": 64}
    options |= {"max_model_len": max(SCALE.tokens) + 256, "enable_prefix_caching": True}
    chosen = json.loads(os.environ.get(OPTIONS, "{}"))
    if not on_gpu():
        return Hardware(CPU.environment, {**CPU.options, **options, **chosen}, CPU.preload)
    environment = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    if importlib.util.find_spec("flashinfer") is None:
        environment["VLLM_USE_FLASHINFER_SAMPLER"] = "0"  # else vLLM does not start
    graphs = {"cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 64]}
    # Two engines share the GPU. The size of each KV cache is set, whatever this share would leave for it.
    return Hardware(environment, {**options, "gpu_memory_utilization": 0.35, "compilation_config": graphs, **chosen})


def scale_weights() -> None:
    """vLLM draws weights so small that attention is uniform: wrong KV would hardly change an answer."""
    import torch
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    loader: Any = DummyModelLoader
    draw, deviation = loader.load_weights, 1e-3 / 3**0.5
    loud = {"qkv_proj": 1.5, "o_proj": 2.0, "lm_head": 3.0}

    def load_weights(self: Any, model: Any, *args: Any, **kwargs: Any) -> None:
        draw(self, model, *args, **kwargs)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.ndim == 1:
                    parameter.data.fill_(1)
                elif "embed" in name:
                    parameter.data.mul_(1 / deviation)
                else:
                    wanted = next((value for part, value in loud.items() if part in name), 1.0)
                    parameter.data.mul_(wanted / deviation / parameter.shape[1] ** 0.5)

    loader.load_weights = load_weights
