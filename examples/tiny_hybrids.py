"""Checkpoints of models whose layers need different parts of a prefix, made as in `tiny_llama`.

python examples/tiny_hybrids.py KIND FOLDER [SEED]
"""

from __future__ import annotations

import sys
from pathlib import Path

from tiny_llama import COMMON, HEARD, HIDDEN, Draw, write


def make_gemma3(folder: Path, seed: int = 0) -> None:
    """Sliding windows and full attention in turns as in Gemma 3: three layers of four see the last 256 tokens."""
    heads, kv_heads, head_dim = 4, 2, 64
    config = COMMON | {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "query_pre_attn_scalar": head_dim,
        "rope_local_base_freq": 10000.0,
        "sliding_window": 256,
        "layer_types": ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"],
    }
    draw = Draw(seed, norm=0.0)  # Gemma's norms add one to their weight
    for layer in draw.layers():
        draw.matrix(f"{layer}.self_attn.q_proj", heads * head_dim, HIDDEN)
        draw.matrix(f"{layer}.self_attn.k_proj", kv_heads * head_dim, HIDDEN)
        draw.matrix(f"{layer}.self_attn.v_proj", kv_heads * head_dim, HIDDEN)
        draw.matrix(f"{layer}.self_attn.o_proj", HIDDEN, heads * head_dim, HEARD)
        for norm in ("q_norm", "k_norm"):
            draw.ones(f"{layer}.self_attn.{norm}", head_dim)
        for norm in ("input", "post_attention", "pre_feedforward", "post_feedforward"):
            draw.ones(f"{layer}.{norm}_layernorm", HIDDEN)
    write(folder, config, draw)


MODELS = {"gemma3": make_gemma3}

if __name__ == "__main__":
    MODELS[sys.argv[1]](Path(sys.argv[2]), *map(int, sys.argv[3:]))
