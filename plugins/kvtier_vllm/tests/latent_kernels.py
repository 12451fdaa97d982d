"""The two kernels that vLLM has for latent attention on a CPU, and what an answer of theirs says behind a prefix."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from sizes import some

from kvtier_vllm import reuse

_AMX = torch.cpu._is_amx_tile_supported()
#: Those of this machine. Behind a prefix CPU_MLA gives other answers, whoever kept it: only bytes can be compared.
KERNELS = some(["AMX_MLA", "CPU_MLA"] if _AMX else ["CPU_MLA"])
needs_amx = pytest.mark.skipif(not _AMX, reason="AMX_MLA needs a CPU with AMX")


def reuse_anyway(patch: Callable[[Any, str, Any], None] = setattr) -> None:
    """Have kvtier serve engines whose prefixes vLLM does not reuse, to look at their bytes."""
    patch(reuse, "refusal", lambda config: "")
    patch(reuse, "refusal_of_backends", lambda names: "")
