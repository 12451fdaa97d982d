"""Whether vLLM itself reuses the prefixes of an engine: where it does not because that would be wrong, nor does kvtier.

An engine's configuration says whether its own prefix cache is on, but not why it is off: its user did not want it, or
vLLM turned it off, because reuse would be wrong with this model or on this machine. So what was asked is noted before
vLLM decides. vLLM need not have looked for such a reason if the cache was off anyway: those that it has are also looked
for here, whatever was asked.
"""

from __future__ import annotations

import functools
from collections.abc import Set
from typing import Any

from vllm import envs
from vllm.config import VllmConfig
from vllm.platforms import CpuArchEnum, current_platform

#: An attribute of vLLM's CacheConfig: True if the user turned prefix caching off, and False if not.
_UNWANTED = "kvtier_unwanted"


def note_wishes() -> None:
    """From now on, note on each configuration that vLLM makes whether its user turned prefix caching off.

    vLLM calls this, through `register`, before it makes the first one. May be repeated.
    """
    from vllm.engine.arg_utils import EngineArgs

    create = EngineArgs.create_engine_config
    if hasattr(create, "kvtier_notes_wishes"):
        return

    @functools.wraps(create)
    def create_engine_config(args: EngineArgs, *positional: Any, **named: Any) -> VllmConfig:
        unwanted = args.enable_prefix_caching is False
        config = create(args, *positional, **named)
        setattr(config.cache_config, _UNWANTED, unwanted)
        return config

    vars(create_engine_config)["kvtier_notes_wishes"] = True
    EngineArgs.create_engine_config = create_engine_config


def refusal(config: VllmConfig) -> str:
    """Why vLLM reuses no prefixes of this engine; empty if it does, or if its user alone does not want it to."""
    if not config.model_config.is_prefix_caching_supported:
        return "vLLM itself does not reuse the prefixes of this model"
    if current_platform.is_cpu() and current_platform.get_cpu_architecture() == CpuArchEnum.RISCV:
        return "vLLM itself does not reuse prefixes on RISC-V"
    unwanted = getattr(config.cache_config, _UNWANTED, None)
    if config.cache_config.enable_prefix_caching or unwanted:
        return ""
    if unwanted is None:
        return (
            "prefix caching is off, and whether vLLM turned it off because reuse would be wrong is unknown: name "
            "kvtier in VLLM_PLUGINS, or turn prefix caching on"
        )
    return "vLLM turned prefix caching off, as it does where reuse would be wrong; its log says why"


def refusal_of_backends(names: Set[str]) -> str:
    """Why vLLM reuses no KV that these attention backends compute; empty if it does."""
    if "CPU_MLA" in names:
        return "vLLM itself does not reuse prefixes with CPU_MLA, which computes wrongly behind one"
    if getattr(envs, "VLLM_BATCH_INVARIANT", False) and (found := names & {"FLASHINFER", "TRITON_MLA"}):
        return f"vLLM itself does not reuse prefixes with {min(found)} and VLLM_BATCH_INVARIANT"
    return ""
