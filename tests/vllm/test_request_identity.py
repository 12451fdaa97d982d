"""Which requests may share KV: one ingredient at a time is changed, and each time nothing may be shared."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file

from kvtier_core.builtin.chained import ChainedConfig
from kvtier_core.types import Namespace
from kvtier_core.vllm import weights
from kvtier_core.vllm.request_identity import Identifier, RequestIdentity

CHUNK = 64
TOKENS = list(range(4 * CHUNK))


def asked(**ingredients):
    from vllm import SamplingParams
    from vllm.v1.request import Request

    return Request("1", TOKENS, SamplingParams(max_tokens=1), None, **ingredients)


def keys(identifier=None, **ingredients):
    """Of one prompt whose request differs in nothing but these."""
    found = (identifier or Identifier()).identify(asked(**ingredients))
    assert isinstance(found, RequestIdentity), found
    database = ChainedConfig().open(Namespace.of({"model": "test"}), CHUNK)
    return database.keys(TOKENS, salt=found.salt, extra=found.extra(CHUNK))


def shared(some, others):
    """How many leading chunks two requests would share."""
    return next((i for i, pair in enumerate(zip(some, others, strict=True)) if pair[0] != pair[1]), len(some))


CAT, DOG = "c" * 64, "d" * 64


def image(identifier, offset, length):
    from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange

    return MultiModalFeatureSpec(None, "image", identifier, PlaceholderRange(offset=offset, length=length))


def adapter(folder, scale=1.0, *, alpha=16, number=1, **options):
    from vllm.lora.request import LoRARequest

    folder.mkdir(exist_ok=True)
    save_file({"a": torch.full((4, 4), scale)}, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(f'{{"lora_alpha": {alpha}}}')
    return LoRARequest("same name", number, str(folder), **options)


def test_what_enters_the_keys_is_the_same_on_every_machine():
    """`tests/core/test_chained.py` has the golden vectors of what becomes of it."""
    found = Identifier().identify(asked(cache_salt="alice é", mm_features=[image(CAT, 120, 20)]))
    assert found.salt == b'{"cache_salt": "alice \\u00e9"}'
    assert found.extra(CHUNK) == {1: f'[[56, 20, "{CAT}"]]'.encode(), 2: f'[[-8, 20, "{CAT}"]]'.encode()}


def test_a_salt_separates_everything():
    assert shared(keys(cache_salt="alice"), keys(cache_salt="alice")) == 4
    assert shared(keys(cache_salt="alice"), keys(cache_salt="bob")) == 0
    assert shared(keys(cache_salt="alice"), keys()) == 0


def test_adapters_are_told_apart_by_content(tmp_path):
    first = keys(lora_request=adapter(tmp_path / "one"))
    assert shared(first, keys(lora_request=adapter(tmp_path / "copy"))) == 4
    assert shared(first, keys(lora_request=adapter(tmp_path / "other", 2.0))) == 0
    assert shared(first, keys(lora_request=adapter(tmp_path / "scaled", alpha=32))) == 0
    assert shared(first, keys(lora_request=adapter(tmp_path / "one", is_3d_lora_weight=True))) == 0
    assert shared(first, keys()) == 0
    # A salt that looks like an adapter is none.
    assert shared(first, keys(cache_salt=weights.digest(tmp_path / "one"))) == 0


def test_an_adapter_whose_files_change_under_the_engine_is_bypassed(tmp_path):
    """The engine keeps what it loaded first, or loads it again: nobody can tell."""
    served = Identifier()
    first = keys(served, lora_request=adapter(tmp_path / "one"))
    replaced = adapter(tmp_path / "one", 3.0)
    why = "LoRA adapter 'same name': its files are not those that the engine saw first"
    assert served.identify(asked(lora_request=replaced)) == why
    assert served.identify(asked(lora_request=adapter(tmp_path / "two", 3.0))) == why  # another folder, the same id
    assert shared(first, keys(served, lora_request=adapter(tmp_path / "two", 3.0, number=2))) == 0
    assert shared(first, keys(lora_request=replaced)) == 0  # an engine that sees it first
    why = "LoRA adapter 'same name': it is loaded anew under its old id"
    assert Identifier().identify(asked(lora_request=adapter(tmp_path / "one", load_inplace=True))) == why


def test_an_adapter_that_cannot_be_found_is_bypassed(tmp_path):
    from vllm.lora.request import LoRARequest

    gone = LoRARequest("gone", 1, str(tmp_path / "gone"))
    assert Identifier().identify(asked(lora_request=gone)) == (
        "LoRA adapter 'gone': its weights cannot be read from disk"
    )
    (tmp_path / "empty").mkdir()
    empty = LoRARequest("empty", 1, str(tmp_path / "empty"))
    assert (
        Identifier().identify(asked(lora_request=empty)) == "LoRA adapter 'empty': there are no weights in its folder"
    )


@pytest.mark.parametrize(
    "other, common",
    [
        (image(CAT, 70, 20), 4),
        (image(DOG, 70, 20), 1),  # the image lies in the second chunk
        (image(CAT, 71, 20), 1),
        (image(CAT, 70, 21), 1),
        (image("lora:" + CAT, 70, 20), 1),
        (image(CAT[:-1] + "0", 70, 20), 1),
        (image(DOG, 0, 20), 0),
        (image(DOG, 255, 1), 1),
    ],
)
def test_images_count_where_they_lie(other, common):
    assert shared(keys(mm_features=[image(CAT, 70, 20)]), keys(mm_features=[other])) == common


def test_what_cannot_be_identified_is_bypassed():
    named = image("holiday.jpg", 70, 20)
    assert Identifier().identify(asked(mm_features=[image(CAT, 0, 9), named])) == (
        "an item of its prompt is named by the caller, not by its content"
    )
    assert Identifier().identify(asked(prompt_embeds=torch.zeros(256, 8))) == "its prompt is given as embeddings"
