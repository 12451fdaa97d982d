"""Which requests may share KV: one ingredient at a time is changed, and each time nothing may be shared."""

from __future__ import annotations

import os
import time

import attrs
import numpy as np
import pytest
import torch
from outsiders import TEXTS, assert_tame
from safetensors.torch import save_file

from kvtier_core.builtin.chained import ChainedConfig
from kvtier_core.engine.request_view import Bypass
from kvtier_core.identity import weights
from kvtier_core.outside import stand_in
from kvtier_core.types import Namespace
from kvtier_vllm.requests import adapters
from kvtier_vllm.requests import fields as request_fields
from kvtier_vllm.requests.adapters import Adapters, Moment
from kvtier_vllm.requests.identity import Identifier, RequestIdentity

CHUNK = 64
TOKENS = list(range(4 * CHUNK))
SECOND = 1_000_000_000


def asked(pooling=None, **ingredients):
    from vllm import SamplingParams
    from vllm.v1.request import Request

    return Request("1", TOKENS, None if pooling else SamplingParams(max_tokens=1), pooling, **ingredients)


def begun(seconds=60):
    """What an engine would use that starts so many seconds from now."""
    moment = Moment()
    return Identifier(Adapters(Moment(moment.by_files + seconds * SECOND, moment.by_boot + seconds * SECOND)))


def keys(identifier=None, **ingredients):
    """Of one prompt whose request differs in nothing but these."""
    found = (identifier or begun()).identify(asked(**ingredients))
    assert isinstance(found, RequestIdentity), found
    database = ChainedConfig().open(Namespace.of({"model": "test"}), CHUNK)
    return database.keys(TOKENS, salt=found.kv.salt, extra=found.kv.extra(CHUNK))


def shared(some, others):
    """How many leading chunks two requests would share."""
    return next((i for i, pair in enumerate(zip(some, others, strict=True)) if pair[0] != pair[1]), len(some))


def test_a_salt_separates_everything():
    assert shared(keys(cache_salt="alice"), keys(cache_salt="alice")) == 4
    assert shared(keys(cache_salt="alice"), keys(cache_salt="bob")) == 0
    assert shared(keys(cache_salt="alice"), keys()) == 0


def test_all_of_a_salt_counts_and_a_long_one_takes_no_memory():
    long = "x" * (5 << 20)
    assert shared(keys(cache_salt=long), keys(cache_salt=long)) == 4
    for other in (long + "y", long[:-1], "x" * 129, "x" * 128, "\ud800" + long, stand_in(long)):
        assert shared(keys(cache_salt=long), keys(cache_salt=other)) == 0, len(other)
    for salt in (long, *TEXTS.values(), "\U0001f600" * 128, "\0" * 128):
        assert len(begun().identify(asked(cache_salt=salt)).kv.salt) <= 1800  # a server takes 2048


def test_why_an_adapter_is_bypassed_is_one_line():
    from vllm.lora.request import LoRARequest

    for text in TEXTS.values():
        for adapter in (LoRARequest(text, 1, "/missing"), LoRARequest("sql", 1, f"/{text[:200]}".replace("\0", ""))):
            bypass = begun().identify(asked(lora_request=adapter))
            assert_tame(bypass.reason)


# -- every field ---------------------------------------------------------------------------------------


def described():
    """Each table, and the classes of the installed vLLM that it is about."""
    from vllm.lora.request import LoRARequest
    from vllm.multimodal import inputs
    from vllm.pooling_params import PoolingParams
    from vllm.v1.engine import EngineCoreRequest

    fields = (inputs.MultiModalBatchedField, inputs.MultiModalFlatField, inputs.MultiModalSharedField)
    return {
        "REQUEST": (request_fields.REQUEST, EngineCoreRequest),
        "POOLING": (request_fields.POOLING, PoolingParams),
        "ADAPTER": (request_fields.ADAPTER, LoRARequest),
        "FEATURE": (request_fields.FEATURE, inputs.MultiModalFeatureSpec),
        "PLACE": (request_fields.PLACE, inputs.PlaceholderRange),
        "ELEMENT": (request_fields.ELEMENT, inputs.MultiModalFieldElem),
        "FIELD": (request_fields.FIELD, *fields),
    }


@pytest.mark.parametrize("table", ["REQUEST", "POOLING", "ADAPTER", "FEATURE", "PLACE", "ELEMENT", "FIELD"])
def test_every_field_of_a_request_is_decided_about(table):
    meanings, *classes = described()[table]
    assert {name for kind in classes for name, _ in request_fields.fields(kind)} == set(meanings)


def test_a_field_of_another_vllm_counts_when_it_is_set(tmp_path):
    from vllm.lora.request import LoRARequest
    from vllm.v1.engine import EngineCoreRequest

    class NewerAdapter(LoRARequest):
        strength: float = 1.0

    class NewerRequest(EngineCoreRequest):
        tilt: float = 0.0

    path = adapter(tmp_path / "one").lora_path
    usual = keys(lora_request=NewerAdapter("one", 1, path))
    assert shared(usual, keys(lora_request=LoRARequest("one", 1, path))) == 4
    stronger = NewerAdapter("one", 1, path, strength=2.0)
    assert begun().identify(asked(lora_request=stronger)) == Bypass(
        "LoRA adapter one: vLLM's field 'strength' of a LoRA adapter is not known to kvtier"
    )
    request = asked()
    request_fields.refuse_others("a request", request, request_fields.REQUEST, NewerRequest)
    request.tilt = 0.5
    with pytest.raises(request_fields.Unidentified, match="vLLM's field 'tilt' of a request is not known to kvtier"):
        request_fields.refuse_others("a request", request, request_fields.REQUEST, NewerRequest)


@pytest.mark.parametrize(
    "ingredients, why",
    [
        ({"prompt_embeds": torch.zeros(256, 8)}, "its prompt is given as embeddings"),
        ({"prompt_is_token_ids": [True] * 256}, "its prompt is given as embeddings"),
        ({"resumable": True}, "it is a session: its prompt is extended later"),
    ],
)
def test_requests_that_cannot_be_identified_are_bypassed(ingredients, why):
    assert begun().identify(asked(**ingredients)) == Bypass(why)


def test_token_types_of_a_pooling_request_are_bypassed():
    from vllm.pooling_params import PoolingParams

    assert begun().identify(asked(PoolingParams(task="embed", dimensions=8))) == RequestIdentity()
    types = PoolingParams(task="classify", extra_kwargs={"compressed_token_type_ids": 7})
    why = "it has pooling parameters that the model may read (extra_kwargs)"
    assert begun().identify(asked(types)) == Bypass(why)


# -- items ---------------------------------------------------------------------------------------------

CAT, DOG = torch.arange(12.0).reshape(3, 4), torch.arange(12.0).reshape(3, 4) + 1


def image(pixels=CAT, offset=70, length=20, *, name="holiday.jpg", modality="image", mask=None, **elements):
    from vllm.multimodal import inputs

    place = inputs.PlaceholderRange(offset=offset, length=length, is_embed=mask)
    data = {"pixel_values": pixels, **elements}
    item = inputs.MultiModalKwargsItem(
        {name: inputs.MultiModalFieldElem(value, inputs.MultiModalBatchedField()) for name, value in data.items()}
    )
    return inputs.MultiModalFeatureSpec(item, modality, name, place, name)


def test_the_input_of_keys_is_the_same_on_every_machine():
    """`tests/builtin/test_chained.py` has the golden vectors of what becomes of it."""
    found = begun().identify(asked(cache_salt="alice é", mm_features=[image(CAT, 120, 20, grid=[1, 2.5, "a", None])]))
    content = "6cb615ef9f351adf2630c20411cc7a88cb21568025c12f184fbc0746020b9f9d"
    assert found.kv.salt == b'{"cache_salt": "alice \\u00e9"}'
    assert found.kv.extra(CHUNK) == {1: f'[[56, 20, "{content}"]]'.encode(), 2: f'[[-8, 20, "{content}"]]'.encode()}


@pytest.mark.parametrize(
    "other, common",
    [
        (image(CAT), 4),
        (image(CAT, name="work.jpg"), 4),  # what it is called says nothing
        (image(CAT.clone().T.contiguous().T), 4),  # nor how it lies in memory
        (image(DOG), 1),  # the image lies in the second chunk
        (image(DOG, name="ab" * 32), 1),
        (image(CAT, 71), 1),
        (image(CAT, 70, 21), 1),
        (image(CAT, modality="video"), 1),
        (image(CAT, mask=torch.ones(20, dtype=torch.bool)), 1),
        (image(CAT.reshape(4, 3)), 1),
        (image(CAT.view(torch.int32)), 1),
        (image([CAT]), 1),
        (image(CAT, grid=[1, 2]), 1),
        (image(DOG, 0), 0),
        (image(DOG, 255, 1), 1),
    ],
)
def test_images_count_by_content_where_they_lie(other, common):
    assert shared(keys(mm_features=[image()]), keys(mm_features=[other])) == common


@pytest.mark.parametrize("one, other", [([1, 2], [1, [2]]), ([1, 2], [12]), (["1"], [1]), (["a\n"], ["a", ""])])
def test_no_two_trees_of_values_are_one(one, other):
    assert shared(keys(mm_features=[image(grid=one)]), keys(mm_features=[image(grid=other)])) == 1


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.bool, torch.int64, torch.complex64])
def test_every_kind_of_tensor_can_be_told(kind):
    one, other = torch.tensor(0, dtype=kind), torch.tensor(1, dtype=kind)
    assert shared(keys(mm_features=[image(one)]), keys(mm_features=[image(other)])) == 1
    assert shared(keys(mm_features=[image(one)]), keys(mm_features=[image(one.reshape(1))])) == 1
    assert shared(keys(mm_features=[image(one)]), keys(mm_features=[image(one.clone())])) == 4


def test_how_tensors_are_put_together_counts():
    from vllm.multimodal import inputs

    def cut(dim, *slices):
        feature = image()
        feature.data["pixel_values"].field = inputs.MultiModalFlatField(slices=slices, dim=dim)
        return keys(mm_features=[feature])

    assert shared(keys(mm_features=[image()]), cut(0)) == 1
    assert shared(cut(0), cut(1)) == 1
    assert shared(cut(0, slice(0, 3)), cut(0, slice(3, 6))) == 4  # another item stood before it


def nowhere():
    feature = image()
    feature.data = None
    return feature


def in_shared_memory():
    from vllm.multimodal.cache.shm import ShmObjectStoreSenderCache

    feature = image()
    feature.data = ShmObjectStoreSenderCache.address_as_item(None, 4096, 1, [7, 8])
    return feature


@pytest.mark.parametrize(
    "item, why",
    [
        (nowhere(), "an item of its prompt came without its content"),
        (in_shared_memory(), "an item of its prompt came without its content"),
        (image(torch.zeros(2, device="meta")), "an item of its prompt holds a Tensor that kvtier cannot read"),
        (image(torch.eye(2).to_sparse()), "an item of its prompt holds a Tensor that kvtier cannot read"),
        (image(np.array([{}])), "an item of its prompt holds a ndarray that kvtier cannot read"),
        (image(CAT, grid={1: 2}), "an item of its prompt holds a dict that kvtier cannot read"),
    ],
)
def test_an_item_without_readable_content_is_bypassed(item, why):
    assert begun().identify(asked(mm_features=[image(), item])) == Bypass(why)


# -- adapters ------------------------------------------------------------------------------------------


def adapter(folder, scale=1.0, *, alpha=16, number=1, **options):
    from vllm.lora.request import LoRARequest

    folder.mkdir(exist_ok=True)
    save_file({"a": torch.full((4, 4), scale)}, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(f'{{"lora_alpha": {alpha}}}')
    return LoRARequest("same name", number, str(folder), **options)


def why_not(identifier, adapter):
    """Why requests with this adapter are bypassed."""
    found = identifier.identify(asked(lora_request=adapter))
    assert isinstance(found, Bypass)
    return found.reason.removeprefix("LoRA adapter same name: ")


def test_adapters_are_distinguished_by_content(tmp_path):
    first = keys(lora_request=adapter(tmp_path / "one"))
    assert shared(first, keys(lora_request=adapter(tmp_path / "copy"))) == 4
    assert shared(first, keys(lora_request=adapter(tmp_path / "other", 2.0))) == 0
    assert shared(first, keys(lora_request=adapter(tmp_path / "scaled", alpha=32))) == 0
    assert shared(first, keys(lora_request=adapter(tmp_path / "one", is_3d_lora_weight=True))) == 0
    assert shared(first, keys()) == 0
    # A salt that looks like an adapter is none.
    assert shared(first, keys(cache_salt=weights.digest(tmp_path / "one"))) == 0


def test_an_adapter_that_changed_after_the_engine_started_is_bypassed(tmp_path):
    """The engine may have loaded it long before the first request that names it, and may load it again."""
    served = begun(seconds=-60)
    young = f"{tmp_path / 'one'} changed after the engine started, or just before"
    assert why_not(served, adapter(tmp_path / "one")) == young
    os.utime(tmp_path / "one", (0, 0))  # what anybody can set does not count
    assert why_not(served, adapter(tmp_path / "one")) == young


def test_one_number_is_one_adapter(tmp_path):
    served = begun()
    first = keys(served, lora_request=adapter(tmp_path / "one"))
    assert why_not(served, adapter(tmp_path / "two", 3.0)) == "its files differ from those that the engine saw first"
    assert shared(first, keys(served, lora_request=adapter(tmp_path / "two", 3.0, number=2))) == 0
    assert why_not(served, adapter(tmp_path / "one", load_inplace=True)) == "it is reloaded under its old id"


def by_a_link(folder):
    (folder / "next").rename(folder / "other")
    (folder / "next").symlink_to("other")
    (folder / "current").symlink_to("next/adapter")
    return folder / "current"


def a_link_set_anew(folder):
    (folder / "current").unlink()
    (folder / "current").symlink_to("previous/adapter")


def a_link_behind_a_link(folder):
    (folder / "next").unlink()
    (folder / "next").symlink_to("previous")


def by_its_path(folder):
    return folder / "next" / "adapter"


def a_file_overwritten(folder):
    (folder / "next/adapter/adapter_config.json").write_text("{}")


def a_file_replaced(folder):
    (folder / "previous/adapter/adapter_config.json").rename(folder / "next/adapter/adapter_config.json")


def a_file_added(folder):
    (folder / "next/adapter/adapter_model.bin").touch()


def the_folder_replaced(folder):
    (folder / "next/adapter").rename(folder / "next/old")
    (folder / "previous/adapter").rename(folder / "next/adapter")


def a_folder_above_replaced(folder):
    (folder / "next").rename(folder / "old")
    (folder / "previous").rename(folder / "next")


@pytest.mark.parametrize(
    "way, change",
    [
        (by_its_path, a_file_overwritten),
        (by_its_path, a_file_replaced),
        (by_its_path, a_file_added),
        (by_its_path, the_folder_replaced),
        (by_its_path, a_folder_above_replaced),
        (by_a_link, a_file_overwritten),
        (by_a_link, a_link_set_anew),
        (by_a_link, a_link_behind_a_link),
    ],
    ids=lambda step: step.__name__.replace("_", " "),
)
def test_any_replacement_of_files_is_noticed(tmp_path, monkeypatch, way, change):
    """After the engine started, and before the first request."""
    from vllm.lora.request import LoRARequest

    monkeypatch.setattr(adapters, "_MARGIN", 0)
    for name, scale in [("next", 1.0), ("previous", 2.0)]:
        (tmp_path / name).mkdir()
        adapter(tmp_path / name / "adapter", scale)
    wanted = LoRARequest("same name", 1, str(way(tmp_path)))
    time.sleep(0.02)  # times of files are as coarse as the kernel's ticks
    began = Moment()
    time.sleep(0.02)
    found = Identifier(Adapters(began)).identify(asked(lora_request=wanted))
    (tmp_path / "unrelated").mkdir()  # others come and go
    assert isinstance(found, RequestIdentity)
    assert Identifier(Adapters(began)).identify(asked(lora_request=wanted)) == found
    change(tmp_path)
    assert why_not(Identifier(Adapters(began)), wanted).endswith("changed after the engine started, or just before")


def test_an_adapter_that_changes_while_it_is_read_is_bypassed(tmp_path, monkeypatch):
    (tmp_path / "above").mkdir()
    wanted = adapter(tmp_path / "above" / "one")

    def read(path):
        (tmp_path / "above").rename(tmp_path / "old")
        (tmp_path / "above").mkdir()
        adapter(tmp_path / "above" / "one", 2.0)
        return "a digest"

    monkeypatch.setattr(weights, "digest", read)
    assert why_not(begun(), wanted) == "its files changed while they were read"


def test_a_clock_that_was_set_back_says_nothing(tmp_path):
    now = Moment()
    served = Identifier(Adapters(attrs.evolve(now, by_files=now.by_files + 60 * SECOND)))
    why = "the machine's clock was set back since the engine started"
    assert why_not(served, adapter(tmp_path / "one")) == why


def test_times_of_another_machine_say_nothing(tmp_path, monkeypatch):
    mounts = tmp_path / "mountinfo"
    mounts.write_text(
        "22 1 254:0 / / rw - ext4 /dev/vda rw\n"
        f"23 22 0:40 / {tmp_path.resolve()}/share rw shared:1 - nfs4 server:/share rw\n"
        "24 22 0:41 / /other rw - fuse.sshfs host: rw\n"
    )
    monkeypatch.setattr(adapters, "_MOUNTS", mounts)
    (tmp_path / "share").mkdir()
    wanted = adapter(tmp_path / "share" / "one")
    assert why_not(begun(), wanted) == (
        f"{tmp_path / 'share'} is on a file system (nfs4) whose times may come from another machine"
    )
    keys(lora_request=adapter(tmp_path / "two"))


def test_an_adapter_that_cannot_be_found_is_bypassed(tmp_path):
    from vllm.lora.request import LoRARequest

    gone = LoRARequest("same name", 1, str(tmp_path / "gone"))
    assert why_not(begun(), gone) == "cannot read its weights from disk"
    (tmp_path / "empty").mkdir()
    empty = LoRARequest("same name", 1, str(tmp_path / "empty"))
    assert why_not(begun(), empty) == "no weights in its folder"
