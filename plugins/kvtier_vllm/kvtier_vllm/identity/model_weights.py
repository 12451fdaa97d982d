"""Identifies the weights of an engine, if that is possible."""

from __future__ import annotations

import glob
import os
from pathlib import Path

import attrs
from vllm.config import LoadConfig, ModelConfig, VllmConfig
from vllm.model_executor.model_loader import DefaultModelLoader, ShardedStateLoader, get_model_loader

from kvtier_core.config.model import NAMED, IdentityConfig
from kvtier_core.identity import weights
from kvtier_core.work.io_pool import run, run_aside
from kvtier_vllm import speculation

#: Loaders that read the model's folder and nothing else. What other loaders read is not known.
_FROM_THE_FOLDER = (DefaultModelLoader, ShardedStateLoader)
#: The format that reads a cache made from the files once, instead of the files.
_FROM_A_CACHE = "npcache"
#: Formats that read the same files if there are any ``*.safetensors`` and none of them is of Mistral's format.
_ALIKE = ("auto", "hf", "safetensors")
_MISTRALS = "consolidated"  # how the names of these files begin; only "auto" prefers them


@attrs.frozen
class ModelWeights:
    """Identified weights."""

    fact: str  #: for the namespace
    warning: str = ""  #: a caveat about the fact, for the log; empty if there is none


@attrs.frozen
class Unknown:
    """An engine's weights, or another of its settings, cannot be identified: it would not be served."""

    reason: str  #: in plain words


def identify(model: ModelConfig, load: LoadConfig, asked: IdentityConfig) -> ModelWeights | Unknown:
    """The weights that an engine has loaded for a model. Reads all of their files, unless their digest is cached.

    ``asked`` is what the configuration specifies for identifying them.
    """
    if asked.named:
        return ModelWeights(
            asked.weights + _format(load),
            "the weights are assumed to be what identity.weights names; this is not checked. Another model under this "
            "name, or the next version of this one, would be given wrong KV",
        )
    if load.load_format == "dummy":
        return ModelWeights(f"dummy, seed {model.seed}")
    if reason := _not_from_the_folder(model, load):
        return Unknown(f"{reason}; name them with identity: {{weights: {NAMED}…}}")
    sampled = asked.weights == "sampled"
    try:
        folder = _folder(model, load)
        found = weights.digest(folder, sampled=sampled)
    except (OSError, ValueError) as error:  # the hub's own errors for what is not on this disk are both
        return Unknown(f"cannot read the weights of {model.model} from this disk: {error}")
    if found is None:
        return Unknown(f"no weights in {folder}")
    found += _format(load, folder)
    if sampled:
        return ModelWeights(
            f"sampled {found}",
            "identity.weights is 'sampled': of a large tensor some hundred KiB are read, and a change elsewhere in it "
            "is not seen",
        )
    return ModelWeights(found)


def identify_all(config: VllmConfig, asked: IdentityConfig) -> ModelWeights | Unknown:
    """The weights of an engine's model and, if it has one, of its draft model; as `identify`."""
    found = identify(config.model_config, config.load_config, asked)
    draft = speculation.draft_model(config)
    if draft is None or isinstance(found, Unknown):
        return found
    drafts = identify(draft.model, draft.load, asked)
    if isinstance(drafts, Unknown):
        return Unknown(f"draft model: {drafts.reason}")
    return attrs.evolve(found, fact=f"{found.fact}; draft model: {drafts.fact}")


def identify_ahead(config: VllmConfig, asked: IdentityConfig) -> None:
    """Begin `identify_all` on a thread, so that a later call finds the digests cached or has less to wait for."""
    run_aside(lambda: identify_all(config, asked), "weights")


def _not_from_the_folder(model: ModelConfig, load: LoadConfig) -> str:
    """Why the weights may differ from those in the model's folder; empty if they cannot."""
    loader = run(lambda: get_model_loader(load)).value  # None if it cannot be made in this process
    if type(loader) not in _FROM_THE_FOLDER or load.load_format == _FROM_A_CACHE:
        return f"load_format {load.load_format!r} reads the weights from a source that kvtier cannot identify"
    return f"the weights are in {model.model_weights}, not on this disk" if model.model_weights else ""


def _format(load: LoadConfig, folder: Path | None = None) -> str:
    """For the fact, the format in which weights are read; empty if each of `_ALIKE` would read the same files."""
    found = glob.glob(os.path.join(folder, "*.safetensors")) if folder else []  # as vLLM's loader does
    alike = load.load_format in _ALIKE and not any(os.path.basename(file).startswith(_MISTRALS) for file in found)
    return "" if found and alike else f", load_format {load.load_format}"


def _folder(model: ModelConfig, load: LoadConfig) -> Path:
    """The folder of the model. Raises OSError or ValueError if it is not on this disk."""
    folder = Path(model.model)
    if folder.exists():
        return folder
    from huggingface_hub import snapshot_download

    return Path(
        snapshot_download(model.model, revision=model.revision, cache_dir=load.download_dir, local_files_only=True)
    )
