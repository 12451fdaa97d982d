"""What a request's KV depends on, with vLLM's own request classes; and what the weights are."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvtier_core.builtin.chained import ChainedConfig
from kvtier_core.types import Namespace
from kvtier_core.vllm import weights
from kvtier_core.vllm.identity import RequestIdentity, identify

CHUNK = 64
TOKENS = list(range(4 * CHUNK))


def keys(**ingredients):
    """Of one prompt whose request differs in nothing but these."""
    from vllm import SamplingParams
    from vllm.v1.request import Request

    request = Request("1", TOKENS, SamplingParams(max_tokens=1), None, **ingredients)
    identity = identify(request)
    assert isinstance(identity, RequestIdentity), identity
    database = ChainedConfig().open(Namespace.of({"model": "test"}), CHUNK)
    return database.keys(TOKENS, salt=identity.salt, extra=identity.extra(CHUNK))


def shared(some, others):
    """How many leading chunks two requests would share."""
    return next((i for i, pair in enumerate(zip(some, others, strict=True)) if pair[0] != pair[1]), len(some))


def image(identifier, offset, length):
    from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange

    return MultiModalFeatureSpec(None, "image", identifier, PlaceholderRange(offset=offset, length=length))


def adapter(folder, scale):
    from vllm.lora.request import LoRARequest

    folder.mkdir(exist_ok=True)
    save_file({"a": torch.full((4, 4), scale)}, folder / "adapter_model.safetensors")
    return LoRARequest("same name", 1, str(folder))


def test_a_salt_separates_everything():
    assert shared(keys(cache_salt="alice"), keys(cache_salt="alice")) == 4
    assert shared(keys(cache_salt="alice"), keys(cache_salt="bob")) == 0
    assert shared(keys(cache_salt="alice"), keys()) == 0


def test_adapters_are_told_apart_by_content(tmp_path):
    first = keys(lora_request=adapter(tmp_path / "one", 1.0))
    assert shared(first, keys(lora_request=adapter(tmp_path / "copy", 1.0))) == 4
    assert shared(first, keys(lora_request=adapter(tmp_path / "other", 2.0))) == 0
    assert shared(first, keys()) == 0
    # Trained on in place: the same name, path and size.
    assert shared(first, keys(lora_request=adapter(tmp_path / "one", 3.0))) == 0


def test_an_adapter_that_cannot_be_found_is_bypassed(tmp_path):
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest
    from vllm.v1.request import Request

    gone = LoRARequest("gone", 1, str(tmp_path / "gone"))
    request = Request("1", TOKENS, SamplingParams(max_tokens=1), None, lora_request=gone)
    assert identify(request) == "the weights of the LoRA adapter 'gone' cannot be found on disk"


@pytest.mark.parametrize(
    "other, common",
    [
        (image("cat", 70, 20), 4),
        (image("dog", 70, 20), 1),  # the image lies in the second chunk
        (image("cat", 71, 20), 1),
        (image("dog", 0, 20), 0),
        (image("dog", 255, 1), 1),
    ],
)
def test_images_count_where_they_lie(other, common):
    assert shared(keys(mm_features=[image("cat", 70, 20)]), keys(mm_features=[other])) == common


def test_every_tensor_of_every_file_counts(tmp_path):
    import tiny_llama

    tiny_llama.make(tmp_path)
    file = tmp_path / "model.safetensors"
    before, tensors = weights.digest(tmp_path), load_file(file)
    for name in tensors:
        changed = {**tensors, name: tensors[name] * 1.5 + 0.1}
        save_file(changed, file, metadata={"format": "pt"})
        assert weights.digest(tmp_path) != before, name
    save_file(tensors, file, metadata={"format": "pt"})
    assert weights.digest(tmp_path) == before
    (tmp_path / "modeling.py").write_text("code of the model's own")
    assert weights.digest(tmp_path) != before


def test_other_formats_are_read_whole(tmp_path):
    (tmp_path / "model.bin").write_bytes(bytes(1 << 20))
    before = weights.digest(tmp_path)
    with (tmp_path / "model.bin").open("r+b") as file:
        file.seek(500_001)
        file.write(b"\1")
    assert weights.digest(tmp_path) != before
    assert weights.digest(tmp_path / "model.bin") is not None


def test_no_weights_no_identity(tmp_path):
    assert weights.digest(tmp_path) is None
