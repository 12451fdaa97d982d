"""Moves keys to other positions of a prompt, for models with rotary position embeddings."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class Rotation:
    """Turns keys from one position to another, by the table of angles that the model's own module makes.

    So scaled embeddings (linear, Llama 3, YaRN, …) need no formula of their own. A test with the model, `model_check`,
    shows whether its layers use the module as expected here.
    """

    def __init__(self, model: nn.Module, positions: int, device: torch.device):
        """For positions below ``positions``. Raises ValueError if the model has not exactly one such module."""
        modules: dict[int, Any] = {id(each): each for each in model.modules() if hasattr(each, "cos_sin_cache")}
        if len(modules) != 1:
            raise ValueError(f"it has {len(modules)} kinds of rotary position embeddings; expected one")
        (module,) = modules.values()
        # The module keeps its table in the type of the model, which may have few digits.
        table = module._compute_cos_sin_cache()[:positions].to(device, torch.float32)
        self._cos, self._sin = table.chunk(2, dim=-1)
        self._dim = int(module.rotary_dim)
        self._halves = bool(module.is_neox_style)

    def turn(self, keys: torch.Tensor, old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        """The keys [tokens, heads, channels] of tokens at the positions ``old``, as they would be at ``new``."""
        cos_old, sin_old, cos_new, sin_new = self._cos[old], self._sin[old], self._cos[new], self._sin[new]
        # Some modules scale what they turn, so the length of an angle's vector is not always 1.
        scale = cos_old.square() + sin_old.square()
        cos = ((cos_new * cos_old + sin_new * sin_old) / scale)[:, None]
        sin = ((sin_new * cos_old - cos_new * sin_old) / scale)[:, None]
        turned, rest = keys[..., : self._dim].float(), keys[..., self._dim :]
        if self._halves:
            first, second = turned.chunk(2, dim=-1)
        else:
            first, second = turned[..., ::2], turned[..., 1::2]
        pair = first * cos - second * sin, second * cos + first * sin
        turned = torch.cat(pair, dim=-1) if self._halves else torch.stack(pair, dim=-1).flatten(-2)
        return torch.cat([turned.to(keys.dtype), rest], dim=-1)
