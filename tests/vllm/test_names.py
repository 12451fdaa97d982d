"""What the engine caches under a name is trusted while the name has stood for one thing alone."""

from __future__ import annotations

import attrs
import pytest
import torch
from vllm import SamplingParams
from vllm.lora.request import LoRARequest
from vllm.multimodal import inputs
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request

from kvtier_core.vllm.requests.identity import Identifier, RequestIdentity
from kvtier_core.vllm.requests.names import Names

BEFORE = "the engine may have cached another item's KV under the same name"
NOW = "an item of its prompt was encoded from another one of the same name"


@attrs.frozen
class Asker:
    request: Request
    identity: RequestIdentity | str


def asker(seed, name="image", *, prefix="", **options):
    """A request of 256 tokens, from the 70th on with an image."""
    element = inputs.MultiModalFieldElem(torch.full((4,), seed), inputs.MultiModalBatchedField())
    item = inputs.MultiModalKwargsItem({"pixel_values": element})
    place = inputs.PlaceholderRange(70, 20, torch.tensor([False] * 5 + [True] * 15))
    feature = inputs.MultiModalFeatureSpec(item, "image", prefix + name, place, name)
    request = Request("1", list(range(256)), SamplingParams(max_tokens=1), None, mm_features=[feature], **options)
    return Asker(request, Identifier().identify(request))


def encode(names, asker, *, freed=()):
    output = SchedulerOutput.make_empty()
    output.free_encoder_mm_hashes = list(freed)
    output.scheduled_encoder_inputs = {"1": [0]} if asker else {}
    names.follow(output, {"1": asker})


@pytest.fixture
def names():
    return Names()


def test_an_encoding_is_used_for_what_it_was_made_of_alone(names):
    cat, dog = asker(1), asker(2)
    assert names.why_not_computed(cat.identity, 0, 256) == NOW  # nobody saw it made
    names = Names()
    encode(names, cat)
    assert not names.why_not_computed(cat.identity, 0, 256)
    assert not names.why_not_computed(dog.identity, 0, 75)  # nothing of the image yet
    assert names.why_not_computed(dog.identity, 0, 76) == NOW
    assert not names.why_not_computed(dog.identity, 90, 256)
    encode(names, dog, freed=["image"])  # dropped and made anew in one step
    assert not names.why_not_computed(dog.identity, 0, 256)
    encode(names, None, freed=["image"])
    assert names.why_not_computed(dog.identity, 0, 256) == NOW


def test_cached_kv_is_used_until_its_name_stood_for_something_else(names):
    cat, dog = asker(1), asker(2)
    assert not names.why_not_cached(cat.identity, 70)  # up to the image
    assert names.why_not_cached(cat.identity, 71) == BEFORE
    encode(names, cat)
    assert not names.why_not_cached(cat.identity, 256)
    assert names.why_not_cached(dog.identity, 256) == BEFORE
    encode(names, dog, freed=["image"])
    assert names.why_not_cached(cat.identity, 256) == names.why_not_cached(dog.identity, 256) == BEFORE


def test_loaded_kv_is_the_engines_own_from_then_on(names):
    cat = asker(1)
    names.load(cat.identity, 64)
    assert names.why_not_cached(cat.identity, 128) == BEFORE
    names.load(cat.identity, 128)
    assert not names.why_not_cached(cat.identity, 128)


def test_who_is_bypassed_for_something_else_does_not_spoil_a_name(names):
    session = asker(1, resumable=True)
    assert isinstance(session.identity, str)
    encode(names, session)
    assert not names.why_not_cached(asker(1).identity, 256)
    assert not names.why_not_computed(asker(1).identity, 0, 256)
    # With an adapter of the encoder's own nobody knows what it made.
    encode(names, asker(1, "other", prefix="lora:", resumable=True))
    assert names.why_not_cached(asker(1, "other", prefix="lora:").identity, 256) == BEFORE


def test_an_adapter_of_an_encoder_counts(names):
    one, other = (asker(1, prefix="lora:", cache_salt=salt) for salt in ("one", "other"))
    encode(names, one)
    assert not names.why_not_computed(one.identity, 0, 256)
    assert names.why_not_computed(other.identity, 0, 256) == NOW


def test_an_adapters_name_stands_for_one_content(names):
    adapter = LoRARequest("sql", 1, "/adapters/sql")
    one, other = (RequestIdentity(adapter=content, adapter_name="sql") for content in ("one", "other"))
    names.arrive(adapter, "one")
    assert not names.why_not_cached(one, 64)
    names.arrive(LoRARequest("sql", 2, "/adapters/sql-2"), "other")
    why = "the engine may have cached another LoRA adapter's KV under the same name"
    assert names.why_not_cached(one, 64) == names.why_not_cached(other, 64) == why
    assert not names.why_not_cached(other, 0)


def test_names_beyond_the_limit_are_not_trusted():
    names = Names(remembered=1)
    first, second = asker(1, "first"), asker(2, "second")
    encode(names, first)
    encode(names, second)
    assert not names.why_not_cached(first.identity, 256)
    assert names.why_not_cached(second.identity, 256) == BEFORE
    assert not names.why_not_computed(second.identity, 0, 256)
