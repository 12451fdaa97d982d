"""SGLang's own HiCache without a GPU: its settings, memory pools, factory and cache controller.

What is not SGLang's: torchvision, whose wheels for the CPU are on no package index. SGLang imports it for pictures, of
which there are none here.
"""

from __future__ import annotations

import importlib.machinery
import json
import sys
import threading
import types
from pathlib import Path

import pytest
from patience import HANG

pytest.importorskip("sglang", reason="SGLang is not installed: make test-hosts")


def _without_torchvision() -> None:
    for name in ("torchvision", "torchvision.transforms", "torchvision.transforms.functional", "torchvision.io"):
        module = types.ModuleType(name)
        module.__path__, module.__spec__ = [], importlib.machinery.ModuleSpec(name, None)
        module.InterpolationMode = types.SimpleNamespace(BICUBIC=3)
        module.to_pil_image = module.ImageReadMode = module.decode_image = None
        sys.modules.setdefault(name, module)


_without_torchvision()

import torch  # noqa: E402
from safetensors.torch import save_file  # noqa: E402
from sglang.srt.managers.cache_controller import HiCacheController  # noqa: E402
from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator  # noqa: E402
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool  # noqa: E402
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost  # noqa: E402
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost  # noqa: E402
from sglang.srt.mem_cache.radix_cache import RadixKey  # noqa: E402
from sglang.srt.mem_cache.utils import get_storage_hash_str  # noqa: E402
from sglang.srt.runtime_context import SpawnRanks, publish  # noqa: E402
from sglang.srt.server_args import ServerArgs  # noqa: E402

PAGE, LAYERS, HEADS, DIM, TOKENS = 4, 3, 2, 16, 256


def model(folder: Path, seed: int = 0, **changes) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HEADS * DIM,
        "num_attention_heads": HEADS,
        "num_hidden_layers": LAYERS,
        "intermediate_size": 64,
        "vocab_size": 1000,
        "max_position_embeddings": 512,
    }
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    save_file({"w": torch.full((64,), float(seed))}, folder / "model.safetensors")
    return folder


def settings(folder: Path, **changes) -> None:
    """Publish SGLang's own settings in this process, as its scheduler does."""
    args = ServerArgs(model_path=str(folder), device="cpu", skip_tokenizer_init=True, random_seed=0, **changes)
    publish(args, role="scheduler", ranks=SpawnRanks(world_rank=0))


def host_pool(layout: str, device: MHATokenToKVPool | None = None) -> MHATokenToKVPoolHost:
    """A rank's host memory, with random numbers."""
    return scrambled(MHATokenToKVPoolHost((device or device_pool())._mha_buffer_info(), **_memory(layout)))


def device_pool() -> MHATokenToKVPool:
    return MHATokenToKVPool(TOKENS, PAGE, torch.bfloat16, HEADS, DIM, LAYERS, "cpu", False)


def latent_pool(layout: str) -> MLATokenToKVPoolHost:
    """That of a rank of a model with latent attention."""
    device = MLATokenToKVPool(TOKENS, PAGE, torch.bfloat16, 32, 8, LAYERS, "cpu", False)
    return scrambled(MLATokenToKVPoolHost(device._mla_buffer_info(), target_layer_num=LAYERS, **_memory(layout)))


def _memory(layout: str) -> dict[str, object]:
    sizes = {"host_to_device_ratio": 2.0, "host_size": 0, "page_size": PAGE, "device_capacity_tokens": TOKENS}
    return {**sizes, "layout": layout, "pin_memory": False, "start_layer": 0, "end_layer": LAYERS}


def scrambled(pool):
    pool.kv_buffer.copy_(torch.randn(pool.kv_buffer.shape))
    return pool


class Host:
    """SGLang's own cache controller over a host memory, with its threads and one storage backend."""

    def __init__(self, backend: str, layout: str, extra: dict):
        device = device_pool()
        allocator = TokenToKVPoolAllocator(TOKENS, torch.bfloat16, "cpu", device, False)
        self.pool = host_pool(layout, device)
        self.controller = HiCacheController(
            allocator, self.pool, PAGE, None, threading.Event(), io_backend="direct", prefetch_threshold=PAGE
        )
        self.controller.attach_storage_backend(backend, PAGE, "a name", dict(extra))

    def back_up(self, prompt: RadixKey) -> list[torch.Tensor]:
        """Write the pages of a prompt from host memory to the storage. Returns them."""
        indices = self.pool.alloc(len(prompt))
        self.controller.write_storage(indices, prompt, get_storage_hash_str(prompt, page_size=PAGE))
        operation = self.controller.ack_backup_queue.get(timeout=HANG)
        assert operation.completed_tokens == len(prompt)
        return self.pages(indices)

    def prefetch(self, prompt: RadixKey) -> list[torch.Tensor]:
        """Read those pages of a prompt that SGLang may use then."""
        self.controller.prefetch("a request", prompt)
        operation = self.controller.prefetch_hit_queue.get(timeout=HANG)
        operation.host_indices = self.pool.alloc(len(operation.hash_value) * PAGE)
        self.controller.prefetch_buffer.put(operation)
        tokens = 0
        while not (ack := self.controller.ack_prefetch_queue.get(timeout=HANG)).completed_req:
            tokens = ack.completed_tokens
        return self.pages(operation.host_indices[:tokens])

    def pages(self, indices: torch.Tensor) -> list[torch.Tensor]:
        return [self.pool.get_data_page(int(start)).clone() for start in indices[::PAGE]]

    def close(self) -> None:
        self.controller.detach_storage_backend()
