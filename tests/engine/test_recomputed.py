"""Engines with KV of draft layers: they compute the end of a hit, and what a step leaves unwritten is not kept."""

from __future__ import annotations

import random

import attrs
import pytest
from fake_host import BLOCK, CHUNK, FRAME, Host

import kvtier_cpu.plugin
from kvtier_core.config.load import load_config
from kvtier_core.config.registry import Registry
from kvtier_core.engine.request_view import RequestView
from kvtier_core.engine.scheduler.provenance import Provenance
from kvtier_core.engine.step import ScheduledRequest, Step


@pytest.fixture
def served():
    """A host that computes the last block of what is found."""
    tiers = [{"type": "cpu", "capacity": f"{32 * FRAME}B"}]
    stack = load_config({"version": 1, "chunk_tokens": CHUNK, "tiers": tiers}, Registry.of(kvtier_cpu.plugin))
    host = Host(stack, recomputed_tokens=BLOCK)
    yield host
    host.close()


def prompt(seed, tokens, prefix=()):
    drawn = random.Random(seed)
    return [*prefix, *(drawn.randrange(1000) for _ in range(tokens - len(prefix)))]


def test_the_end_of_what_is_found_may_be_left_to_the_engine(served):
    asked = prompt(1, 4 * CHUNK + 3)
    assert (served.ask("first", asked), served.ask("second", asked)) == (0, 4 * CHUNK - BLOCK)
    assert served.ask("third", prompt(2, 50, asked[:CHUNK])) == CHUNK - BLOCK
    served.assert_at_rest()


def test_nothing_is_offered_of_which_only_that_end_is_new(served):
    asked = prompt(1, CHUNK + 3)
    served.ask("first", asked)
    request = RequestView("second", asked, len(asked))
    assert served.side.match(request, CHUNK - BLOCK) == 0
    assert served.side.match(request, 0) == CHUNK - BLOCK


def test_what_a_step_leaves_unwritten_is_not_trusted_nor_what_stands_on_it():
    provenance = Provenance([BLOCK])
    whole = Step((), (), lambda request_id: [[1, 2, 3]])
    partial = attrs.evolve(whole, writes_all=False)
    assert provenance.computed(None, ScheduledRequest("a", 0, BLOCK), whole) == BLOCK
    assert provenance.computed(BLOCK, ScheduledRequest("a", BLOCK, BLOCK), partial) == BLOCK
    assert provenance.computed(BLOCK, ScheduledRequest("a", 2 * BLOCK, BLOCK), whole) == BLOCK
    assert [provenance.trusts_any([block]) for block in (1, 2, 3)] == [True, False, False]


def test_what_was_computed_for_rejected_drafts_is_not_trusted_when_it_is_not_written_again():
    """Three of the tokens counted before the step were rejected since."""
    provenance = Provenance([BLOCK])
    partial = Step((), (), lambda request_id: [[1, 2, 3]], writes_all=False)
    assert provenance.computed(BLOCK + 3, ScheduledRequest("a", BLOCK, 1), partial) == BLOCK
