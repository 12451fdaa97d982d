"""Checkpoints of models whose layers need different parts of a prefix, drawn like those of `tiny_llama`.

    python examples/tiny_hybrids.py KIND FOLDER [SEED]

Tensors have the names and shapes that transformers gives them. Windows and chunks of local attention end a few hundred
tokens back, and states forget slowly: whatever a layer keeps of a prefix, the answer depends on it.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from tiny_llama import COMMON, HEARD, INNER, LOUD, PLAIN, SHARP

_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
_MAMBA2 = {"mamba_n_heads": 8, "mamba_d_head": 64, "mamba_n_groups": 1, "mamba_d_state": 32}

#: A configuration of each kind, besides what all have in common. On the CPU vLLM computes `qwen3_next` in bfloat16
#: only, and Mamba 2 (`granite`, `falcon_h1`) in steps of one block.
KINDS = {
    # three layers of four see the last 256 tokens
    "gemma3": {
        "model_type": "gemma3_text",
        "sliding_window": 256,
        "query_pre_attn_scalar": 64,
        "layer_types": ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"],
    },
    # all layers see the last 256 tokens
    "mistral": {"model_type": "mistral", "sliding_window": 256},
    # every other layer sees the last 128 tokens; experts and attention sinks
    "gpt_oss": {
        "model_type": "gpt_oss",
        "sliding_window": 128,
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    # three layers of four see the tokens since the last multiple of 512
    "llama4": {
        "model_type": "llama4_text",
        "attention_chunk_size": 512,
        "moe_layers": [],
        "interleave_moe_layer_step": 0,
        "intermediate_size_mlp": INNER,
        "no_rope_layers": [1, 1, 1, 0],
    },
    # three layers of four are gated delta nets; one has experts
    "qwen3_next": {
        "model_type": "qwen3_next",
        "mlp_only_layers": [0, 1, 2],
        "num_experts": 2,
        "num_experts_per_tok": 1,
        "moe_intermediate_size": INNER,
        "shared_expert_intermediate_size": INNER,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
        "full_attention_interval": 4,
    },
    # three layers of four are Mamba 2
    "granite": {
        "model_type": "granitemoehybrid",
        "layer_types": ["mamba", "mamba", "attention", "mamba"],
        "num_local_experts": 0,
        "shared_intermediate_size": INNER,
        **_MAMBA2,
    },
    # attention and Mamba 2 side by side in each layer
    "falcon_h1": {"model_type": "falcon_h1", "mamba_d_ssm": 512, **_MAMBA2},
}

#: The gains of matrices whose names end so; of others they are `tiny_llama.PLAIN`.
_GAINS = {
    "q_proj": SHARP,
    "k_proj": SHARP,
    "o_proj": HEARD,
    "out_proj": HEARD,
    "lm_head": LOUD,
    "embed_tokens": LOUD,  # less than what the layers add to it
}
_SLOWLY = -5.0  #: of a recurrent state the bias of its time steps: it forgets half in some hundred tokens


def make(kind: str, folder: Path, seed: int = 0) -> None:
    """A model of one of the `KINDS`. Another seed gives other weights of the same shapes."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    config = AutoConfig.for_model(**{**COMMON, **_HEADS, **KINDS[kind]})
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            _draw(name.removesuffix(".weight"), tensor)
    model.save_pretrained(folder)


def _draw(name: str, tensor: torch.Tensor) -> None:
    """Draw a matrix anew. What transformers gives vectors, norms for instance, changes nothing of what is read."""
    if name.endswith(("dt_bias", "dt_proj.bias")):
        tensor.fill_(_SLOWLY)
    elif name.endswith(("q_norm", "k_norm")):
        tensor.add_(SHARP - 1)
    elif tensor.dim() > 1 and not name.endswith("A_log"):
        inputs = tensor.shape[1] if "experts" in name else tensor.shape[-1]
        tensor.normal_(std=_GAINS.get(name.rpartition(".")[2], PLAIN) / inputs**0.5)


if __name__ == "__main__":
    make(sys.argv[1], Path(sys.argv[2]), *map(int, sys.argv[3:]))
