"""A tiny Llama that knows few words, and draft models of each kind for it.

Whatever a random draft model says is as likely as any other word, so that of few words some are accepted. What it says
depends on the KV of its own layers at every position.
"""

from __future__ import annotations

import json
from pathlib import Path

import tiny_llama
import torch
from safetensors.torch import load_file, save_file
from tiny_llama import HIDDEN

_WORDS = slice(10, 14)

Tensors = dict[str, torch.Tensor]


def make_target(folder: Path, seed: int = 0) -> None:
    """Also a draft model of its own, for the method of that name."""
    tiny_llama.make(folder, seed)
    _write(folder, {}, load_file(folder / "model.safetensors"))


def make_eagle(folder: Path, seed: int = 1) -> None:
    """One layer over a hidden state and the next token. It embeds and speaks as the target does."""
    tiny_llama.make(folder, seed, layers=1)
    layer = _layer(folder, 0)
    del layer["input_layernorm.weight"]
    tensors = {"fc.weight": _drawn(seed, 2), **{f"layers.0.{name}": tensor for name, tensor in layer.items()}}
    _write(folder, {}, tensors)


def make_eagle3(folder: Path, seed: int = 2) -> None:
    """One layer, of two inputs, over the hidden states of three of the target's."""
    tiny_llama.make(folder, seed, layers=2)
    layer, second = _layer(folder, 0), _layer(folder, 1)
    for name in ("q_proj", "k_proj", "v_proj"):
        attention = f"self_attn.{name}.weight"
        layer[attention] = torch.cat([layer[attention], second[attention]], dim=1)
    tensors = load_file(folder / "model.safetensors")
    tensors = {
        "fc.weight": _drawn(seed, 3),
        "norm.weight": tensors["model.norm.weight"],
        "lm_head.weight": tensors["lm_head.weight"],
        "midlayer.hidden_norm.weight": torch.ones(HIDDEN),
        **{f"midlayer.{name}": tensor for name, tensor in layer.items()},
    }
    config = {"architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1}
    _write(folder, config | {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}, tensors)


def make_mtp(folder: Path, seed: int = 3) -> None:
    """MiMo: the target and its draft layer in one folder."""
    tiny_llama.make(folder, seed, layers=tiny_llama.LAYERS + 1)
    draft = f"model.layers.{tiny_llama.LAYERS}."
    tensors = load_file(folder / "model.safetensors")
    for name in list(tensors):
        if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):
            tensors[name.replace("weight", "bias")] = torch.zeros(len(tensors[name]))
    tensors = {name.replace(draft, "model.mtp_layers.0."): tensor for name, tensor in tensors.items()}
    tensors["model.mtp_layers.0.input_proj.weight"] = _drawn(seed, 2)
    for norm in ("token_layernorm", "hidden_layernorm", "final_layernorm"):
        tensors[f"model.mtp_layers.0.{norm}.weight"] = torch.ones(HIDDEN)
    config = {"architectures": ["MiMoForCausalLM"], "model_type": "qwen2", "num_nextn_predict_layers": 1}
    _write(folder, config | {"num_hidden_layers": tiny_llama.LAYERS}, tensors)


def _layer(folder: Path, number: int) -> Tensors:
    prefix = f"model.layers.{number}."
    tensors = load_file(folder / "model.safetensors")
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def _drawn(seed: int, inputs: int) -> torch.Tensor:
    """A matrix that makes one hidden state of several."""
    drawn = torch.randn(HIDDEN, inputs * HIDDEN, generator=torch.Generator().manual_seed(seed))
    return drawn / (inputs * HIDDEN) ** 0.5


def _write(folder: Path, config: dict, tensors: Tensors) -> None:
    """The checkpoint in the folder with these changes; of all words it says only a few."""
    head = tensors.get("lm_head.weight")
    if head is not None:
        tensors["lm_head.weight"] = torch.zeros_like(head)
        tensors["lm_head.weight"][_WORDS] = head[_WORDS]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))
