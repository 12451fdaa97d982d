"""Which engines may share KV, as the facts of a namespace. An engine that cannot be identified is not served."""

from __future__ import annotations

import functools
import importlib.metadata
import inspect
import sys
import types
from collections.abc import Sequence
from pathlib import Path

import torch
import vllm
from torch import nn
from vllm import envs
from vllm.config import ModelConfig, VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader import get_model_cls
from vllm.platforms import current_platform
from vllm.utils.argparse_utils import FlexibleArgumentParser

from kvtier_core.config.model import NAMED, IdentityConfig
from kvtier_core.engine.messages import WorkerReport
from kvtier_core.frames.format import FORMAT_VERSION
from kvtier_core.identity import weights
from kvtier_core.layouts import KVGroup
from kvtier_core.transfer.regroup import with_heads
from kvtier_core.types import Namespace
from kvtier_core.work.io_pool import run
from kvtier_vllm import speculation
from kvtier_vllm.identity import harmless, model_weights, settings
from kvtier_vllm.identity.model_weights import Unknown
from kvtier_vllm.identity.settings import UnidentifiedError

_Code = type | types.FunctionType
_LONGEST, _NONE = "longest sequence", "none"
#: Packages whose code is identified by the versions of the engine and of what is stored.
_OF_THE_ENGINE = ("vllm", "torch", "kvtier_core", "kvtier_vllm")


def of_arguments(model: str, identity: IdentityConfig, arguments: Sequence[str]) -> Namespace | Unknown:
    """The facts of an engine with these vLLM arguments that are known before it runs, or why it would not be served."""
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser(prog="vllm"))
    config = EngineArgs.from_cli_args(parser.parse_args(["--model", model, *arguments])).create_engine_config()
    try:
        found = model_weights.identify_all(config, identity)
        return found if isinstance(found, Unknown) else Namespace.of(facts_before_start(config, found.fact))
    except (UnidentifiedError, ValueError) as error:
        return Unknown(str(error))


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
        **settings.of_configuration(config, started=False),
        **settings.variables(),
    }


def facts_after_start(config: VllmConfig, chunk_tokens: int, report: WorkerReport) -> dict[str, object]:
    """Facts that only the running engine knows. Raises UnidentifiedError."""
    facts = {**settings.of_configuration(config, started=True), **dict(report.facts), "chunk tokens": chunk_tokens}
    groups: Sequence[KVGroup] = report.groups
    if report.own_ranks:
        facts["ranks with the same KV"] = report.replicas
    else:
        times = config.parallel_config.tensor_parallel_size // report.replicas
        groups = [with_heads(group, times) for group in report.groups]
        facts["heads in pages"] = "; ".join(str(group.elements) for group in groups)
    return {**facts, "KV groups": "; ".join(group.fact for group in groups)}


def of_engine(config: VllmConfig, weights_fact: str, chunk_tokens: int, report: WorkerReport) -> Namespace:
    """The namespace of a running engine: all that makes its pages interchangeable. Raises UnidentifiedError."""
    facts = {**facts_before_start(config, weights_fact), **facts_after_start(config, chunk_tokens, report)}
    counted = facts if report.own_ranks else facts.keys() - harmless.OF_RANKS
    return Namespace.of({name: facts[name] for name in counted})


def facts_of_worker(config: VllmConfig, asked: IdentityConfig, models: Sequence[nn.Module]) -> dict[str, str]:
    """Facts that only a worker knows: those of `facts_of_code`, and of the ``models`` that it has loaded.

    Raises UnidentifiedError.
    """
    packages = _packages(models)
    facts = {**facts_of_code(config, asked), "packages in the model": packages}
    if packages == _NONE and not _names_the_longest_sequence(models):
        facts[_LONGEST] = "any"
    return facts


def facts_of_code(config: VllmConfig, asked: IdentityConfig) -> dict[str, str]:
    """The device, the longest sequence, and the classes of the models that an engine loads.

    Raises UnidentifiedError.
    """
    facts = {
        _LONGEST: str(config.model_config.max_model_len),
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
            f"{found.__qualname__} may load weights from a second place; name them with identity: {{weights: {NAMED}…}}"
        )
    return _code_of(found)


def _code_of(model: type) -> str:
    """The name of a model's class and, unless it is vLLM's own, a digest of its package."""
    name = f"{model.__module__}.{model.__qualname__}"
    top = _package_of(model)
    return name if top in _OF_THE_ENGINE else f"{name} {_digest_of_package(top, model)}"


def _packages(models: Sequence[nn.Module]) -> str:
    """The packages, except the engine's, whose code is in the modules of these models, with their digests.

    A module has the code of its class, of the bases of that class, and of functions that replaced theirs. Libraries
    attach their helpers to torch's own classes as soon as they are imported: there, only `forward` counts.
    """
    if not models:
        raise UnidentifiedError("this vLLM does not expose its model, so its code cannot be identified")
    modules = [module for model in models for module in model.modules()]
    code: dict[_Code, None] = {}
    for each in {base: None for module in modules for base in type(module).__mro__}:
        code |= {each: None, **_functions_in(each, "forward" if _package_of(each) == "torch" else "")}
    for module in modules:
        code |= _functions_in(module)
    owners = {_package_of(each): each for each in code}
    ours = {*_OF_THE_ENGINE, *sys.stdlib_module_names}
    found = [f"{top} {_digest_of_package(top, each)}" for top, each in sorted(owners.items()) if top not in ours]
    return ", ".join(found) or _NONE


def _names_the_longest_sequence(models: Sequence[nn.Module]) -> bool:
    """May vLLM's code of these models depend on the longest sequence, as some kinds of rope do?"""
    code = {base.__module__ for model in models for module in model.modules() for base in type(module).__mro__}
    of_vllm = [name for name in code if name.partition(".")[0] == "vllm"]
    sources = [run(functools.partial(_source, name)).value for name in of_vllm]
    return not all(text and "max_model_len" not in text for text in sources)


def _source(module: str) -> str:
    return inspect.getsource(sys.modules[module])


def _functions_in(owner: object, only: str = "") -> dict[_Code, None]:
    """The functions among the attributes of a class or a module; with ``only``, the one of that name."""
    found = vars(owner).items()
    return {each: None for name, each in found if isinstance(each, types.FunctionType) and only in ("", name)}


def _package_of(code: _Code) -> str:
    return (code.__module__ or "").partition(".")[0]


def _digest_of_package(top: str, code: _Code) -> str:
    """A digest of all code of a package; of the file with this ``code`` if it is not one. Raises UnidentifiedError."""
    name = f"{code.__module__}.{code.__qualname__}"
    package = getattr(sys.modules.get(top), "__file__", None) or run(lambda: inspect.getsourcefile(code)).value
    if not package:
        raise UnidentifiedError(f"the code of the model, {name}, is not in a file")
    file = Path(package)
    try:
        return weights.code_digest(file.parent if file.name == "__init__.py" else file)
    except OSError as error:
        raise UnidentifiedError(f"cannot read the code of the model, {name}: {error}") from error


def _has_a_second_source(model: type) -> bool:
    """May the model load weights from outside its folder, too, as vLLM allows? A digest of the folder misses those."""
    word = "secondary_weights"
    try:
        return any(
            word in inspect.getsource(sys.modules[each.__module__])  # most have it nowhere, and need not be parsed
            and word in inspect.getsource(each)
            for each in model.__mro__
            if each.__module__.partition(".")[0] not in (*sys.stdlib_module_names, "torch")
        )
    except (KeyError, OSError, TypeError):
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
        if point.dist is not None and not point.value.startswith("kvtier_vllm:")
    }
    return ", ".join(sorted(found))
