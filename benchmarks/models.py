"""The models that engines are measured with."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import attrs

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))  # which is no package
from real_model import ModelUnavailable, checkpoint

__all__ = ["HYBRID", "RANDOM", "TRAINED", "Model", "ModelUnavailable"]


@attrs.frozen
class Model:
    """A checkpoint, and how to get it."""

    name: str  #: as the text above a table says it
    checkpoint: Callable[[Path], Path]
    """Takes a folder in which a checkpoint may be made, and returns where one lies. Raises ModelUnavailable."""


def _random(folder: Path) -> Path:
    import tiny_llama  # loads torch, which nothing else here needs

    tiny_llama.make(folder / "model")
    return folder / "model"


def _hybrid(folder: Path) -> Path:
    import tiny_hybrids

    tiny_hybrids.make("gemma3", folder / "model")
    return folder / "model"


RANDOM = Model("the random model of `examples/tiny_llama.py`", _random)
HYBRID = Model("the random model of `examples/tiny_hybrids.py` in the shape of Gemma 3", _hybrid)
TRAINED = Model("SmolLM2-135M-Instruct, the trained model of `examples/real_model.py`,", lambda folder: checkpoint())
