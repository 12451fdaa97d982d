"""Which engines may share KV, as the facts of a namespace. An engine that cannot be identified is not served."""

from __future__ import annotations

import importlib.metadata
import inspect
import sys
from pathlib import Path

import torch
import vllm
from vllm import envs
from vllm.config import ModelConfig, VllmConfig
from vllm.model_executor.model_loader import get_model_cls
from vllm.platforms import current_platform

from kvtier_core.config.model import NAMED, IdentityConfig
from kvtier_core.engine import weights
from kvtier_core.engine.messages import WorkerReport
from kvtier_core.frames.format import FORMAT_VERSION
from kvtier_core.transfer.io_pool import run
from kvtier_core.types import Namespace
from kvtier_core.vllm import speculation
from kvtier_core.vllm.identity import settings
from kvtier_core.vllm.identity.settings import UnidentifiedError

#: Packages whose code is identified by the engine's versions.
_OF_THE_ENGINE = ("vllm", "torch")


def facts_before_start(config: VllmConfig, weights_fact: str) -> dict[str, object]:
    """Facts that are known before an engine runs. ``weights_fact`` identifies its weights.

    Raises UnidentifiedError for a setting that cannot be compared between engines.
    """
    return {
        "format": FORMAT_VERSION,
        "engine": f"vllm {vllm.__version__}, torch {torch.__version__}",
        "plugins": _plugins(),
        "weights": weights_fact,
        "experts exchange tokens": config.model_config.is_moe and config.parallel_config.use_all2all,  # maybe rounded
        **settings.before_start(config),
        **settings.variables(),
    }


def facts_after_start(config: VllmConfig, chunk_tokens: int, report: WorkerReport) -> dict[str, object]:
    """Facts that only the running engine knows. Raises UnidentifiedError."""
    return {
        **settings.after_start(config),
        **dict(report.facts),
        "KV groups": "; ".join(group.fact for group in report.groups),
        "ranks with the same KV": report.replicas,
        "chunk tokens": chunk_tokens,
    }


def of_engine(config: VllmConfig, weights_fact: str, chunk_tokens: int, report: WorkerReport) -> Namespace:
    """The namespace of a running engine: all that makes its pages interchangeable. Raises UnidentifiedError."""
    return Namespace.of({**facts_before_start(config, weights_fact), **facts_after_start(config, chunk_tokens, report)})


def facts_of_worker(config: VllmConfig, asked: IdentityConfig) -> dict[str, str]:
    """Facts that only a worker knows: the device, and the code of the models. Raises UnidentifiedError."""
    facts = {
        "device name": current_platform.get_device_name(),
        "model code": _checked_code(config.model_config, asked),
    }
    if draft := speculation.draft_model(config):
        facts["draft model code"] = _checked_code(draft.model, asked)
    return facts


def _checked_code(model: ModelConfig, asked: IdentityConfig) -> str:
    """The code of a model, as `_code_of`. Raises UnidentifiedError also if its weights may be from two places."""
    found = get_model_cls(model)
    if not asked.named and _has_a_second_source(found):
        raise UnidentifiedError(
            f"{found.__qualname__} may load weights from a second place; identity: {{weights: {NAMED}…}} names them"
        )
    return _code_of(found)


def _code_of(model: type) -> str:
    """The name of a model's class, and unless it is vLLM's own a digest of its package."""
    name = f"{model.__module__}.{model.__qualname__}"
    top = model.__module__.partition(".")[0]
    if top in _OF_THE_ENGINE:
        return name
    package = getattr(sys.modules.get(top), "__file__", None) or run(lambda: inspect.getsourcefile(model)).value
    if not package:
        raise UnidentifiedError(f"the code of the model, {name}, is not in a file")
    file = Path(package)
    try:
        return f"{name} {weights.code_digest(file.parent if file.name == '__init__.py' else file)}"
    except OSError as error:
        raise UnidentifiedError(f"the code of the model, {name}, cannot be read: {error}") from error


def _has_a_second_source(model: type) -> bool:
    """May the model load weights from outside its folder too, as vLLM allows? A digest of the folder misses those."""
    try:
        return any(
            "secondary_weights" in inspect.getsource(each)
            for each in model.__mro__
            if each.__module__.partition(".")[0] not in (*sys.stdlib_module_names, "torch")
        )
    except (OSError, TypeError):
        return True


def _plugins() -> str:
    """The packages that vLLM loads as plugins, with their versions. Not kvtier, whose frame format is a fact itself."""
    installed = importlib.metadata.entry_points()
    groups = [group for group in installed.groups if group.startswith("vllm.")]
    found = {
        f"{group}: {point.name} {point.dist.name} {point.dist.version}"
        for group in groups
        for point in installed.select(group=group)
        if envs.VLLM_PLUGINS is None or point.name in envs.VLLM_PLUGINS
        if point.dist is not None and not point.value.startswith("kvtier_core.")
    }
    return ", ".join(sorted(found))
