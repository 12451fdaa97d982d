"""A BLIP-2 of a megabyte. An image becomes the first tokens of its prompt, and all that follows depends on it.

Of vLLM's image models it is one of the few that need no torchvision, beside which this build of torch does not import.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
import words
from PIL import Image
from transformers import (
    Blip2Config,
    Blip2ForConditionalGeneration,
    Blip2Processor,
    BlipImageProcessor,
)

VOCAB = 2048
IMAGE_TOKENS = 16
_PIXELS = 28
_GAIN = 1.5  # of every matrix: small weights answer the same to everything

_TOWER = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
_TEXT = {
    "model_type": "opt",
    "vocab_size": VOCAB,
    "hidden_size": 128,
    "word_embed_proj_dim": 128,
    "num_hidden_layers": 2,
    "ffn_dim": 256,
    "num_attention_heads": 2,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
}


def make(folder: Path) -> None:
    Blip2Processor(
        BlipImageProcessor(size={"height": _PIXELS, "width": _PIXELS}),
        words.tokenizer(VOCAB, image=VOCAB - 1),
        num_query_tokens=IMAGE_TOKENS,
    ).save_pretrained(folder)
    config = Blip2Config(
        vision_config=_TOWER | {"image_size": _PIXELS, "patch_size": 14},
        qformer_config=_TOWER | {"vocab_size": 32, "cross_attention_frequency": 2, "encoder_hidden_size": 64},
        text_config=_TEXT,
        num_query_tokens=IMAGE_TOKENS,
        image_token_index=VOCAB - 1,
        architectures=["Blip2ForConditionalGeneration"],
    )
    model = Blip2ForConditionalGeneration(config).float()
    drawn = torch.Generator().manual_seed(0)
    for weight in model.parameters():
        if weight.dim() > 1:
            weight.data = torch.randn(weight.shape, generator=drawn) * (_GAIN / weight[0].numel() ** 0.5)
    model.save_pretrained(folder)


def image(seed: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 255, (_PIXELS, _PIXELS, 3), dtype=np.uint8))
