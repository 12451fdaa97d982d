"""Checkpoints of a few megabytes, made here, whose every answer depends on the whole prompt.

    python examples/tiny_llama.py FOLDER [SEED]

The usual tiny random model answers the same token to everything, so a cache could hand it garbage unnoticed.
These draw larger weights: attention is sharp and the layers carry it on, so one other token anywhere changes
all that follows. There is no tokenizer: prompts are token ids below `VOCAB`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

VOCAB = 2048
LAYERS = 4
HIDDEN = 256
INNER = 512

#: Of a matrix: the standard deviation of what it gives for inputs of standard deviation 1.
PLAIN = 1.0
SHARP = 1.5  # queries and keys: of hundreds of tokens some tens get most of the attention, and not always the same
HEARD = 2.0  # what attention adds: more than the token itself brings along
LOUD = 3.0  # logits: the best token leads clearly

COMMON = {
    "vocab_size": VOCAB,
    "num_hidden_layers": LAYERS,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "dtype": "float32",
}


def make(folder: Path, seed: int = 0, layers: int = LAYERS) -> None:
    """A Llama with grouped queries. Another seed gives other weights of the same shapes."""
    heads, kv_heads, head_dim = 4, 2, 64
    config = COMMON | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
    }
    draw = Draw(seed)
    for layer in draw.layers(layers):
        draw.matrix(f"{layer}.self_attn.q_proj", heads * head_dim, HIDDEN, SHARP)
        draw.matrix(f"{layer}.self_attn.k_proj", kv_heads * head_dim, HIDDEN, SHARP)
        draw.matrix(f"{layer}.self_attn.v_proj", kv_heads * head_dim, HIDDEN)
        draw.matrix(f"{layer}.self_attn.o_proj", HIDDEN, heads * head_dim, HEARD)
        draw.ones(f"{layer}.input_layernorm", HIDDEN)
        draw.ones(f"{layer}.post_attention_layernorm", HIDDEN)
    write(folder, config, draw)


def make_mla(folder: Path, seed: int = 0) -> None:
    """Multi-head latent attention as in DeepSeek-V2, without experts: one KV head of 512 + 64, no values of its own."""
    heads, rank, rope, nope = 4, 512, 64, 64
    config = COMMON | {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "hidden_act": "silu",
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "q_lora_rank": None,
        "kv_lora_rank": rank,
        "qk_rope_head_dim": rope,
        "qk_nope_head_dim": nope,
        "v_head_dim": nope,
        "first_k_dense_replace": LAYERS,  # no layer has experts
    }
    draw = Draw(seed)
    for layer in draw.layers():
        draw.matrix(f"{layer}.self_attn.q_proj", heads * (nope + rope), HIDDEN, SHARP)
        draw.matrix(f"{layer}.self_attn.kv_a_proj_with_mqa", rank + rope, HIDDEN, SHARP)
        draw.ones(f"{layer}.self_attn.kv_a_layernorm", rank)
        draw.matrix(f"{layer}.self_attn.kv_b_proj", heads * 2 * nope, rank, SHARP)
        draw.matrix(f"{layer}.self_attn.o_proj", HIDDEN, heads * nope, HEARD)
        draw.ones(f"{layer}.input_layernorm", HIDDEN)
        draw.ones(f"{layer}.post_attention_layernorm", HIDDEN)
    write(folder, config, draw)


def make_experts(folder: Path, seed: int = 0) -> None:
    """Experts as in Qwen 3: of four in each layer every token is computed by two."""
    heads, kv_heads, head_dim, experts = 4, 2, 64, 4
    config = COMMON | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_act": "silu",
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "num_experts": experts,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": INNER,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }
    draw = Draw(seed)
    for layer in draw.layers(experts=experts):
        draw.matrix(f"{layer}.self_attn.q_proj", heads * head_dim, HIDDEN)
        draw.matrix(f"{layer}.self_attn.k_proj", kv_heads * head_dim, HIDDEN)
        draw.matrix(f"{layer}.self_attn.v_proj", kv_heads * head_dim, HIDDEN)
        draw.matrix(f"{layer}.self_attn.o_proj", HIDDEN, heads * head_dim, HEARD)
        for norm in ("self_attn.q_norm", "self_attn.k_norm"):
            draw.ones(f"{layer}.{norm}", head_dim)
        draw.ones(f"{layer}.input_layernorm", HIDDEN)
        draw.ones(f"{layer}.post_attention_layernorm", HIDDEN)
    write(folder, config, draw)


class Draw:
    """The tensors of a checkpoint, drawn in the order of the calls."""

    def __init__(self, seed: int, norm: float = 1.0):
        self.tensors: dict[str, torch.Tensor] = {}
        self._random = torch.Generator().manual_seed(seed)
        self._norm = norm

    def matrix(self, name: str, rows: int, columns: int, gain: float = PLAIN) -> None:
        self._put(name, torch.randn(rows, columns, generator=self._random) * (gain / columns**0.5))

    def ones(self, name: str, size: int) -> None:
        """The weight of a norm that changes nothing."""
        self._put(name, torch.full((size,), self._norm))

    def layers(self, count: int = LAYERS, experts: int = 0):
        """Draw the tensors that every model has; yields the prefix of each layer for the others."""
        self._put("model.embed_tokens", torch.randn(VOCAB, HIDDEN, generator=self._random))
        for number in range(count):
            layer = f"model.layers.{number}"
            yield layer
            if experts:
                self.matrix(f"{layer}.mlp.gate", experts, HIDDEN)
            for mlp in [f"{layer}.mlp.experts.{expert}" for expert in range(experts)] or [f"{layer}.mlp"]:
                self.matrix(f"{mlp}.gate_proj", INNER, HIDDEN)
                self.matrix(f"{mlp}.up_proj", INNER, HIDDEN)
                self.matrix(f"{mlp}.down_proj", HIDDEN, INNER)
        self.ones("model.norm", HIDDEN)
        self.matrix("lm_head", VOCAB, HIDDEN, LOUD)

    def _put(self, name: str, tensor: torch.Tensor) -> None:
        self.tensors[f"{name}.weight"] = tensor


def write(folder: Path, config: dict, draw: Draw) -> None:
    """A folder as the hub has them."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    save_file(draw.tensors, folder / "model.safetensors", metadata={"format": "pt"})


if __name__ == "__main__":
    make(Path(sys.argv[1]), *map(int, sys.argv[2:]))
