"""Engines with KV of draft layers: it depends on the tokens behind it; what a step leaves unwritten is not kept."""

from __future__ import annotations

import attrs
import pytest
from fake_host import BLOCK, CHUNK, LAYOUT, Host, prompt

import kvtier_cpu.plugin
from kvtier_core.config.load import load_config
from kvtier_core.config.registry import Registry
from kvtier_core.engine.request_view import KVIdentity, PromptItem
from kvtier_core.engine.scheduler.provenance import Provenance, Trust
from kvtier_core.engine.step import ScheduledRequest, Step
from kvtier_core.layouts import ChunkLayout, KVKind
from kvtier_testing.samples import make_group

WINDOW = make_group((256, 256), name="window", block_tokens=BLOCK, kind=KVKind.SLIDING_WINDOW, reach=2 * CHUNK)


@pytest.fixture
def host():
    """``host(lookahead)`` is a host whose KV depends on so many tokens behind it."""
    hosts = []

    def start(lookahead, layout=LAYOUT, **more):
        tiers = [{"type": "cpu", "capacity": f"{32 * layout.frame_nbytes}B"}]
        values = {"version": 1, "chunk_tokens": CHUNK, "tiers": tiers, **more}
        stack = load_config(values, Registry.of(kvtier_cpu.plugin))
        hosts.append(Host(stack, layout=layout, lookahead=lookahead, blocks=80))
        return hosts[-1]

    yield start
    for each in hosts:
        each.close()


@pytest.mark.parametrize("lookahead", [1, 3])
def test_a_chunk_is_found_where_the_tokens_after_it_are_equal_too(host, lookahead):
    served, asked = host(lookahead), prompt(1, 4 * CHUNK + 3)
    assert (served.ask("first", asked), served.ask("second", asked)) == (0, 4 * CHUNK)
    for same in range(lookahead):
        assert served.ask(f"parts {same} behind", prompt(2 + same, 50, asked[: 2 * CHUNK + same])) == CHUNK
    assert served.ask("parts later", prompt(9, 50, asked[: 2 * CHUNK + lookahead])) == 2 * CHUNK
    served.assert_at_rest()


@pytest.mark.parametrize("lookahead", [1, 3])
def test_of_a_prompt_that_is_stored_in_part_the_tokens_after_a_chunk_are_part_of_it(host, lookahead):
    served = host(lookahead)
    for fewer, chunks in enumerate((2, 1)):
        asked = prompt(1 + fewer, 4 * CHUNK + 3)
        served.ask("stores", asked, most_stored=2 * CHUNK + lookahead - fewer)
        assert served.ask("asks", asked) == chunks * CHUNK
    served.assert_at_rest()


@pytest.mark.parametrize("lookahead", [1, 3])
def test_a_prompt_without_these_tokens_has_no_such_chunk(host, caplog, lookahead):
    caplog.set_level("INFO")
    served, asked = host(lookahead), prompt(1, 2 * CHUNK + lookahead - 1)
    assert (served.ask("first", asked), served.ask("second", asked)) == (0, CHUNK)
    assert served.ask("short", asked[: CHUNK + lookahead - 1]) == 0
    why = f"less than one chunk of {CHUNK} tokens to look up before the {lookahead} that drafts read"
    tokens = CHUNK + lookahead - 1
    assert f"short: {tokens} tokens: 0 from kvtier, {tokens} computed ({why})" in caplog.text
    assert served.ask("one more", [*asked, 7]) == CHUNK
    assert served.ask("again", [*asked, 7]) == 2 * CHUNK
    served.assert_at_rest()


@pytest.mark.parametrize("layout", [LAYOUT, ChunkLayout([*LAYOUT.groups, WINDOW], CHUNK)], ids=["full", "window"])
@pytest.mark.parametrize("lookahead", [1, 3])
def test_generated_chunks_are_kept_once_the_tokens_after_them_are_known(host, lookahead, layout):
    served, asked = host(lookahead, layout, save_decode=True), prompt(1, CHUNK + 3)
    request = served.submit("first", asked)
    for token in range(3 * CHUNK):
        while request.computed < len(request.tokens):
            served.step()
        served.generate(request, token)
    served.run(request)
    again = [*request.tokens, 1, 2, 3]
    assert served.ask("second", again) == 4 * CHUNK
    served.assert_at_rest()


def test_an_item_after_a_chunk_counts_as_the_tokens_there(host):
    served, asked = host(1), prompt(1, 2 * CHUNK + 3)

    def showing(image):
        return KVIdentity(items=(PromptItem(2 * CHUNK, 2, image),))

    assert served.ask("first", asked, identity=showing("a cat")) == 0
    assert served.ask("another", asked, identity=showing("a dog")) == CHUNK
    assert served.ask("the same", asked, identity=showing("a cat")) == 2 * CHUNK
    served.assert_at_rest()


def ahead_in(tokens, lookahead=1):
    """What is ahead of the blocks of a request with these tokens, as long as they are all known."""
    return lambda end: bytes(tokens[end : end + lookahead]) if end + lookahead <= len(tokens) else None


def test_kv_that_a_step_left_unwritten_is_not_stored_nor_anything_after_it():
    provenance, trust, ahead = Provenance([BLOCK]), Trust(), ahead_in(bytes(4 * BLOCK))
    whole = Step((), (), lambda request_id: [[1, 2, 3]])
    partial = attrs.evolve(whole, writes_all=False)
    assert provenance.computed(trust, ScheduledRequest("a", 0, BLOCK), whole, ahead) == BLOCK
    assert provenance.computed(trust, ScheduledRequest("a", BLOCK, BLOCK), partial, ahead) == BLOCK
    assert provenance.computed(trust, ScheduledRequest("a", 2 * BLOCK, BLOCK), whole, ahead) == BLOCK
    assert [provenance.trusts_any([block]) for block in (1, 2, 3)] == [True, False, False]


def test_kv_of_rejected_drafts_is_not_stored_unless_it_is_written_again():
    """Three of the tokens counted before the step were rejected since."""
    provenance, trust = Provenance([BLOCK]), Trust(BLOCK + 3)
    partial = Step((), (), lambda request_id: [[1, 2, 3]], writes_all=False)
    assert provenance.computed(trust, ScheduledRequest("a", BLOCK, 1), partial, ahead_in(bytes(4 * BLOCK))) == BLOCK


# -- blocks that the engine keeps in its own prefix cache, under the tokens before their end -----------------


def taken_over(provenance, tokens, blocks, lookahead=1):
    """How many tokens of a second request are trusted that has all these blocks from the engine."""
    start, step = len(blocks) * BLOCK, Step((), (), lambda request_id: [[*blocks, 99]])
    return provenance.computed(Trust(), ScheduledRequest("b", start, 1), step, ahead_in(tokens, lookahead)) - 1


@pytest.mark.parametrize("lookahead", [1, 3])
@pytest.mark.parametrize("loads", [False, True])
def test_a_block_is_trusted_for_those_that_have_the_same_tokens_after_it(lookahead, loads):
    provenance, asked = Provenance([BLOCK], lookahead), bytes(range(4 * BLOCK))
    if loads:
        provenance.loaded([[1, 2, 3]], {1, 2, 3}, ahead_in(asked, lookahead))
    else:
        step = Step((), (), lambda request_id: [[1, 2, 3, 4]])
        provenance.computed(Trust(), ScheduledRequest("a", 0, 4 * BLOCK), step, ahead_in(asked, lookahead))
    assert taken_over(provenance, asked, [1, 2, 3], lookahead) == 3 * BLOCK
    for same in range(lookahead):
        for block in (1, 2, 3):
            parts = [*asked[: block * BLOCK + same], *[100] * len(asked)]
            assert taken_over(provenance, parts, [1, 2, 3], lookahead) == (block - 1) * BLOCK - 1
            assert taken_over(provenance, parts, [1, 2, 3][: block - 1], lookahead) == (block - 1) * BLOCK


@pytest.mark.parametrize("lookahead", [1, 3])
def test_a_block_is_trusted_once_the_tokens_after_it_are_known_and_computed_with(lookahead):
    """Generated tokens: of each step, the last one is known only after it."""
    provenance, trust, asked = Provenance([BLOCK], lookahead), Trust(), bytes(range(4 * BLOCK))
    step = Step((), (), lambda request_id: [[1, 2]])
    for known in range(BLOCK, BLOCK + lookahead):
        start = 0 if known == BLOCK else known - 1
        ahead = ahead_in(asked[:known], lookahead)
        provenance.computed(trust, ScheduledRequest("a", start, known - start), step, ahead)
        assert provenance.trusts_any([1])
        assert taken_over(provenance, asked, [1], lookahead) == -1
    provenance.look_ahead(trust, ahead_in(asked[: BLOCK + lookahead], lookahead))  # the request ends
    assert taken_over(provenance, asked, [1], lookahead) == BLOCK


@pytest.mark.parametrize("lookahead", [1, 3])
def test_a_block_is_not_trusted_before_all_tokens_after_it_are_computed_with(lookahead):
    """The last modules have not run over its end yet, although the prompt has the tokens that they will read."""
    provenance, trust, asked = Provenance([BLOCK], lookahead), Trust(), bytes(range(4 * BLOCK))
    step = Step((), (), lambda request_id: [[1, 2]])
    for end in range(BLOCK, BLOCK + lookahead):
        assert taken_over(provenance, asked, [1], lookahead) == -1
        start = 0 if end == BLOCK else end - 1
        provenance.computed(trust, ScheduledRequest("a", start, end - start), step, ahead_in(asked, lookahead))
    assert taken_over(provenance, asked, [1], lookahead) == BLOCK


def test_a_block_that_another_request_has_by_now_is_its_own():
    provenance, trust, asked = Provenance([BLOCK], 1), Trust(), bytes(range(4 * BLOCK))
    step = Step((), (), lambda request_id: [[1, 2]])
    provenance.computed(trust, ScheduledRequest("a", 0, BLOCK), step, ahead_in(asked[:BLOCK]))
    provenance.allocated([[1]], 0)
    provenance.look_ahead(trust, ahead_in(asked))
    assert (provenance.trusts_any([1]), trust.open) == (False, {})
