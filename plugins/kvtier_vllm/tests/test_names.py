"""What vLLM caches under a name is trusted while the name has stood for one content alone."""

from __future__ import annotations

import sys

import attrs
import pytest
import torch
from outsiders import TEXTS
from vllm import SamplingParams
from vllm.lora.request import LoRARequest
from vllm.multimodal import inputs
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request

from kvtier_core.engine.request_view import Bypass
from kvtier_vllm.requests.identity import Identifier, RequestIdentity
from kvtier_vllm.requests.names import CachedNames
from kvtier_vllm.requests.tracker import RequestTracker

BEFORE = Bypass("the engine may have cached another item's KV under the same name")
NOW = Bypass("an item of its prompt was encoded from another item with the same name")


def asked(seed, name="image", *, prefix="", request_id="1", **options):
    """A request of 256 tokens, from the 70th on with an image."""
    element = inputs.MultiModalFieldElem(torch.full((4,), seed), inputs.MultiModalBatchedField())
    item = inputs.MultiModalKwargsItem({"pixel_values": element})
    place = inputs.PlaceholderRange(70, 20, torch.tensor([False] * 5 + [True] * 15))
    feature = inputs.MultiModalFeatureSpec(item, "image", prefix + name, place, name)
    return Request(request_id, list(range(256)), SamplingParams(max_tokens=1), None, mm_features=[feature], **options)


def identity(*args, **options):
    return Identifier().identify(asked(*args, **options))


def encode(names, identity):
    (item,) = identity.items
    names.note_encoding(item.name, item.source)


@pytest.fixture
def names():
    return CachedNames()


def test_an_encoding_is_used_for_what_it_was_made_from_alone(names):
    cat, dog = identity(1), identity(2)
    assert names.check_encoded(cat, 0, 256) == NOW  # it was never seen being made
    names = CachedNames()
    encode(names, cat)
    assert not names.check_encoded(cat, 0, 256)
    assert not names.check_encoded(dog, 0, 75)  # nothing of the image yet
    assert names.check_encoded(dog, 0, 76) == NOW
    assert not names.check_encoded(dog, 90, 256)
    names.drop_encoding("image")
    encode(names, dog)  # dropped and made anew in one step
    assert not names.check_encoded(dog, 0, 256)
    names.drop_encoding("image")
    assert names.check_encoded(dog, 0, 256) == NOW


def test_cached_kv_is_used_until_its_name_stood_for_something_else(names):
    cat, dog = identity(1), identity(2)
    assert not names.check_cached(cat, 70)  # up to the image
    assert names.check_cached(cat, 71) == BEFORE
    encode(names, cat)
    assert not names.check_cached(cat, 256)
    assert names.check_cached(dog, 256) == BEFORE
    names.drop_encoding("image")
    encode(names, dog)
    assert names.check_cached(cat, 256) == names.check_cached(dog, 256) == BEFORE


def test_loaded_kv_is_the_engines_own_from_then_on(names):
    cat = identity(1)
    names.note_load(cat, 64)
    assert names.check_cached(cat, 128) == BEFORE
    names.note_load(cat, 128)
    assert not names.check_cached(cat, 128)


def test_an_adapter_of_an_encoder_counts(names):
    one, other = (identity(1, prefix="lora:", cache_salt=salt) for salt in ("one", "other"))
    encode(names, one)
    assert not names.check_encoded(one, 0, 256)
    assert names.check_encoded(other, 0, 256) == NOW


def test_an_adapters_name_stands_for_one_content(names):
    one, other = (RequestIdentity(adapter=content, adapter_name="sql") for content in ("one", "other"))
    names.note_adapter("sql", "one")
    assert not names.check_cached(one, 64)
    names.note_adapter("sql", "other")
    why = Bypass("the engine may have cached another LoRA adapter's KV under the same name")
    assert names.check_cached(one, 64) == names.check_cached(other, 64) == why
    assert not names.check_cached(other, 0)


def test_names_are_forgotten_only_when_many_others_were_used_since():
    names = CachedNames(generation=4)
    used, idle = identity(0, "used"), identity(1, "idle")
    encode(names, idle)
    encode(names, used)
    for number in range(2, 40):
        other = identity(number, f"content {number}")
        encode(names, other)
        assert not names.check_cached(other, 256) and not names.check_cached(used, 256)
    assert names.check_cached(idle, 256) == BEFORE
    assert len(names._younger) + len(names._older) <= 8


def test_a_name_of_two_contents_is_not_trusted_for_as_long_as_it_is_used():
    names = CachedNames(generation=4)
    one, other = identity(1), identity(2)
    encode(names, one)
    encode(names, other)
    for number in range(3, 40):
        encode(names, identity(number, f"image {number}"))
        assert names.check_cached(one, 256) == names.check_cached(other, 256) == BEFORE


# -- the tracker of requests, which sees what vLLM's scheduler decides -----------------------------------


def step(*scheduled, encoded=(), freed=()):
    """vLLM's output for a step that computes so many tokens of these requests."""
    output = SchedulerOutput.make_empty()
    output.free_encoder_mm_hashes = list(freed)
    output.scheduled_encoder_inputs = {request.request_id: [0] for request in encoded}
    output.num_scheduled_tokens = {request.request_id: tokens for request, tokens in scheduled}
    return output


@pytest.fixture
def tracker(names):
    return RequestTracker(names=names)


def test_a_request_that_computes_from_another_encoding_is_bypassed_at_that_step(tracker):
    cat, dog = asked(1, request_id="cat"), asked(2, request_id="dog")
    assert not any(isinstance(tracker.view(each).identity, Bypass) for each in (cat, dog))
    assert tracker.follow(step((cat, 256), (dog, 70), encoded=[cat])) == {}
    dog.num_computed_tokens = 70
    assert tracker.follow(step((dog, 186))) == {"dog": NOW}
    assert tracker.view(dog).identity == NOW
    assert tracker.view(cat).identity != NOW


def test_an_encoding_that_is_freed_and_replaced_in_one_step_is_the_new_one(tracker):
    cat, dog = asked(1, request_id="cat"), asked(2, request_id="dog")
    for each in (cat, dog):
        tracker.view(each)
    assert tracker.follow(step((cat, 256), encoded=[cat])) == {}
    assert tracker.follow(step((dog, 256), encoded=[dog], freed=["image"])) == {}


def test_cached_kv_of_another_item_is_a_bypass_from_then_on(tracker):
    cat, dog = asked(1, request_id="cat"), asked(2, request_id="dog")
    tracker.view(cat)
    tracker.follow(step((cat, 256), encoded=[cat]))
    tracker.view(dog)
    assert tracker.check_cached("dog", 64) is None
    assert tracker.check_cached("dog", 128) == BEFORE
    assert tracker.view(dog).identity == BEFORE


def test_a_load_reaches_as_far_as_the_engines_tokens_and_its_own(tracker):
    cat = asked(1)
    tracker.view(cat)
    tracker.check_cached("1", 64)
    tracker.note_load("1", 64)
    assert tracker.check_cached("1", 128) is None


def test_long_names_are_told_apart_and_take_no_memory(tracker, names):
    cat, dog = (asked(seed, TEXTS["long"] + str(seed), request_id=str(seed)) for seed in (1, 2))
    for each in (cat, dog):
        assert not isinstance(tracker.view(each).identity, Bypass)
    assert tracker.follow(step((cat, 256), (dog, 256), encoded=[cat, dog])) == {}
    assert tracker.check_cached("1", 256) is tracker.check_cached("2", 256) is None
    again = asked(2, TEXTS["long"] + "1", request_id="3")
    tracker.view(again)
    assert tracker.check_cached("3", 256) == BEFORE
    assert max(map(len, names._younger)) < 200 and max(map(len, names._encoded)) < 200
    tracker.follow(step(freed=[TEXTS["long"] + "1", TEXTS["long"] + "2"]))
    assert not names._encoded


def test_a_request_that_is_bypassed_for_something_else_does_not_spoil_a_name(tracker, names):
    session = asked(1, resumable=True)
    assert isinstance(tracker.view(session).identity, Bypass)
    assert tracker.follow(step((session, 256), encoded=[session])) == {}
    assert not names.check_cached(identity(1), 256)
    assert not names.check_encoded(identity(1), 0, 256)
    # With an adapter of the encoder's own it is not known what it made.
    other = asked(1, "other", prefix="lora:", resumable=True, request_id="2")
    tracker.view(other)
    tracker.follow(step((other, 256), encoded=[other]))
    assert names.check_cached(identity(1, "other", prefix="lora:"), 256) == BEFORE


def test_a_request_with_an_adapter_notes_its_name(names):
    class Known(Identifier):
        def identify(self, request):
            return RequestIdentity(adapter=self.adapter(request.lora_request), adapter_name="sql")

        def adapter(self, asked):
            return f"content of {asked.lora_path}"

    tracker = RequestTracker(Known(), names)
    for number in (1, 2):
        adapter = LoRARequest("sql", number, f"/adapters/{number}")
        tracker.view(asked(1, request_id=str(number), lora_request=adapter))
        assert (tracker.check_cached(str(number), 64) is None) is (number == 1)


def test_a_view_is_the_request_as_it_is_now_and_is_forgotten_with_it(tracker):
    request = asked(1, cache_salt="alice")
    first = tracker.view(request)
    assert (first.tokens, first.prompt_tokens, first.computed_tokens, first.most_loaded) == (256, 256, 0, sys.maxsize)
    assert attrs.evolve(first.identity, items=()).salt == b'{"cache_salt": "alice"}'
    request.append_output_token_ids(7)
    request.num_computed_tokens = 256
    last = tracker.finish(request)
    assert (last.tokens, last.prompt_tokens, last.computed_tokens) == (257, 256, 256)
    assert last.identity is first.identity
    assert tracker.finish(request) is None and not tracker
