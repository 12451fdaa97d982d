"""The figures of `kvtier quality` against values computed by hand, and its prompts."""

from __future__ import annotations

import math
import random

import attrs
import pytest

from kvtier_core.config.quality import Estimate
from kvtier_core.errors import BackendError
from kvtier_core.frames.identity import CodecIdentity
from kvtier_vllm.quality.prompts import our_texts, prompts_of, read_texts
from kvtier_vllm.quality.statistics import Place, bootstrap, compare, divergence, finds

CODEC = CodecIdentity("kivi", bytes(range(32)), lossless=False)


def place(probabilities, told=0, told_probability=0.5):
    top = {token: math.log(probability) for token, probability in probabilities.items()}
    return Place(top, told, math.log(told_probability))


# -- statistics ----------------------------------------------------------------------------------------


def test_the_divergence_of_two_whole_distributions():
    """0.5 ln(0.5 / 0.25) + 0.5 ln(0.5 / 0.75), and the other way round 0.25 ln(0.25 / 0.5) + 0.75 ln(0.75 / 0.5)."""
    even, skewed = place({1: 0.5, 2: 0.5}), place({1: 0.25, 2: 0.75})
    assert divergence(even, even) == 0.0
    assert divergence(even, skewed) == pytest.approx(0.143841, abs=1e-6)
    assert divergence(skewed, even) == pytest.approx(0.130812, abs=1e-6)


def test_tokens_that_only_the_first_lists_count_as_one():
    """Token 1 is in both. In the other the second has at most the 0.1 of its last one, and the rest, 0.1, has 0.1 too.

    0.6 ln(0.6 / 0.8) + 0.3 ln(0.3 / 0.1) + 0.1 ln(0.1 / 0.1), where the 0.2 are divided so that this is the least.
    """
    found = divergence(place({1: 0.6, 2: 0.3}), place({1: 0.8, 3: 0.1}))
    assert found == pytest.approx(0.6 * math.log(0.75) + 0.3 * math.log(3), abs=1e-6)


def test_the_remaining_probability_is_divided_alike():
    """The 0.2 may all be of token 2: it has 0.15 of them, as it has 0.3 of 0.4. So all but token 1 counts as one."""
    found = divergence(place({1: 0.6, 2: 0.3}), place({1: 0.8, 3: 0.16}))
    assert found == pytest.approx(0.6 * math.log(0.75) + 0.4 * math.log(2), abs=1e-6)


def test_two_sure_models_that_disagree_are_far_apart():
    assert divergence(place({1: 0.99, 3: 0.001}), place({2: 0.99, 4: 0.001})) > 4


def test_the_estimate_never_exceeds_the_divergence_of_whole_distributions():
    drawn = random.Random(0)
    for _ in range(300):
        whole = [[drawn.gauss(0, 3) for _ in range(50)]]
        whole.append([each + drawn.gauss(0, drawn.choice([0.01, 0.3, 3])) for each in whole[0]])
        logs = [[each - math.log(sum(map(math.exp, logits))) for each in logits] for logits in whole]
        exact = sum(math.exp(p) * (p - q) for p, q in zip(*logs, strict=True))
        tops = [dict(sorted(enumerate(each), key=lambda pair: -pair[1])[:8]) for each in logs]
        found = divergence(*(Place(top, 0, 0.0) for top in tops))
        assert 0 <= found <= exact + 1e-9


def test_the_interval_of_equal_values_is_a_point():
    assert bootstrap([[0.25, 0.25], [0.25]]) == Estimate(0.25, 0.25, 0.25)


def test_prompts_are_drawn_and_not_values():
    """Two prompts: a draw has the mean 0, 0.5 or 1, with one, two and one chances of four."""
    assert bootstrap([[0.0] * 100, [1.0] * 100]) == Estimate(0.5, 0.0, 1.0)


def test_the_interval_of_many_prompts_is_that_of_the_normal_distribution():
    """400 prompts, of which half are 1: the standard error of the mean is 0.5 / 20."""
    found = bootstrap([[float(number % 2)] for number in range(400)])
    assert found.value == 0.5
    assert found.low == pytest.approx(0.5 - 1.96 * 0.025, abs=0.006)
    assert found.high == pytest.approx(0.5 + 1.96 * 0.025, abs=0.006)
    assert found == bootstrap([[float(number % 2)] for number in range(400)])


def test_figures_of_a_run():
    """Of four places one has another likeliest token; the text's are half as likely; one of two needles is lost."""
    same, other = place({1: 0.6, 2: 0.4}, 1, 0.6), place({1: 0.4, 2: 0.6}, 1, 0.3)
    worse = attrs.evolve(same, told_logprob=math.log(0.3))
    found = compare(
        [[same, same], [same, same], [same], [same]],
        [[worse, worse], [worse, other], [same], [other]],
        [False, False, True, True],
    )
    assert found.top1.value == 0.75
    assert found.perplexity.value == pytest.approx(1.0)
    assert found.kl.value == pytest.approx((0.6 * math.log(1.5) + 0.4 * math.log(2 / 3)) / 4)
    assert found.lost.value == 0.5


def test_a_needle_is_found_if_every_token_is_the_likeliest():
    right, wrong = place({1: 0.6, 2: 0.4}, told=1), place({1: 0.6, 2: 0.4}, told=2)
    assert finds([right, right])
    assert not finds([right, wrong])


# -- prompts -------------------------------------------------------------------------------------------


def encode(text):
    return [ord(character) for character in text]


def test_prompts_have_their_length_and_go_on_as_the_text_does():
    text = "".join(chr(33 + number % 80) for number in range(2000))
    prompts = prompts_of([text], encode, [0], 500, 40)
    windows = [prompt for prompt in prompts if prompt.depth is None]
    assert all(len(prompt.tokens) == 500 and prompt.tokens[0] == 0 for prompt in prompts)
    assert len(windows) == 6
    for window in windows:
        assert "".join(map(chr, [*window.tokens[1:], *window.continuation])) in text
    ends = [text.index("".join(map(chr, window.tokens[1:]))) for window in windows]
    assert ends[0] == 0


def test_each_needle_is_at_its_depth_and_is_asked_for():
    prompts = [each for each in prompts_of(["-" * 2000], encode, [], 500, 40) if each.depth is not None]
    assert {each.depth for each in prompts} == {0.1, 0.3, 0.5, 0.7, 0.9}
    for each in prompts:
        text, answer = "".join(map(chr, each.tokens)), "".join(map(chr, each.continuation))
        sentence = text.split("\n\n")[1]
        assert sentence.endswith(f"{answer}. Remember it.")
        assert sentence.startswith(text.split("\n\n")[-1])
        assert text.index("\n\n") == pytest.approx(each.depth * text.count("-"), abs=2)


def test_texts_that_are_too_short_are_no_prompts():
    with pytest.raises(BackendError, match="no text has 540 tokens"):
        prompts_of(["short"], encode, [], 500, 40)


def test_our_texts_are_long_enough_for_the_defaults():
    assert len(our_texts()) == 3
    assert all(len(text) > 5000 for text in our_texts())


def test_texts_of_a_file(tmp_path):
    (tmp_path / "some.txt").write_text("one text")
    (tmp_path / "some.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n')
    (tmp_path / "wrong.jsonl").write_text('{"prompt": "one"}\n')
    assert read_texts(tmp_path / "some.txt") == ["one text"]
    assert read_texts(tmp_path / "some.jsonl") == ["one", "two"]
    with pytest.raises(BackendError, match="cannot read prompts from"):
        read_texts(tmp_path / "wrong.jsonl")
