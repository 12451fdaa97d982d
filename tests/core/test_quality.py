"""The figures of `kvtier quality` against values computed by hand, its prompts, and its report."""

from __future__ import annotations

import json
import math
import random

import attrs
import pytest

from kvtier_core.errors import BackendError
from kvtier_core.frames.identity import CodecIdentity
from kvtier_core.quality.prompts import our_texts, prompts_of, read_texts
from kvtier_core.quality.report import Report, ReportRefused, Thresholds
from kvtier_core.quality.statistics import Estimate, Figures, Place, bootstrap, compare, divergence, finds

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


def test_each_needle_lies_at_its_depth_and_is_asked_for():
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
    with pytest.raises(BackendError, match="holds no prompts"):
        read_texts(tmp_path / "wrong.jsonl")


# -- the report ----------------------------------------------------------------------------------------


def report(**others):
    good = Figures(
        kl=Estimate(0.01, 0.008, 0.02),
        top1=Estimate(0.98, 0.96, 0.99),
        perplexity=Estimate(0.002, -0.001, 0.01),
        lost=Estimate(0.0, 0.0, 0.0),
    )
    return Report("a digest", CODEC.type, CODEC.digest.hex(), good, good, recall=0.9, **others)


def figures(**others):
    return {"figures": attrs.evolve(report().figures, **others)}


def written(path, told):
    path.write_text(told if isinstance(told, str) else told.to_json())
    return path


def test_a_report_comes_back_from_its_file(tmp_path):
    first = report(about={"model": "a model", "needles": [{"depth": 0.1}]}, thresholds=Thresholds(kl=0.1))
    again = Report.read(written(tmp_path / "report.json", first))
    assert again == first
    again.check("a digest", CODEC)
    again.check(None, CODEC)


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        (figures(kl=Estimate(0.04, 0.03, 0.051)), "the mean KL divergence may be 0.051, more than 0.05"),
        (figures(top1=Estimate(0.97, 0.949, 0.98)), "the top-1 agreement may be 0.949, less than 0.95"),
        (figures(perplexity=Estimate(0.01, 0.0, 0.021)), "the perplexity may rise by 0.021, more than 0.02"),
        (figures(lost=Estimate(0.06, 0.0, 0.1)), "needles are lost: 0.06, more than 0.05"),
        ({"recall": 0.4}, "the model itself finds of the needles only 0.4, less than 0.5"),
    ],
)
def test_the_pessimistic_end_of_an_interval_counts(changed, why):
    told = attrs.evolve(report(), **changed)
    assert told.failures == [why]
    with pytest.raises(ReportRefused, match=f"the codec did not pass: {why}"):
        told.check("a digest", CODEC)


def test_a_report_of_something_else_does_not_count():
    with pytest.raises(ReportRefused, match="it is of the weights 'a digest', and the engine's are 'another'"):
        report().check("another", CODEC)
    with pytest.raises(ReportRefused, match="it is of kivi 00010203, and the codec is kivi ffffffff, lossy"):
        report().check("a digest", attrs.evolve(CODEC, digest=b"\xff" * 32))
    with pytest.raises(ReportRefused, match="and the codec is fp8"):
        report().check("a digest", attrs.evolve(CODEC, type="fp8"))


def edited(change):
    content = json.loads(report().to_json())
    change(content)
    return json.dumps(content)


def resealed(change):
    """As by somebody who knows how the checksum is made, and writes nonsense."""
    from kvtier_core.quality import report as module

    content = json.loads(edited(change))
    content["checksum"] = module._checksum({name: each for name, each in content.items() if name != "checksum"})
    return json.dumps(content)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "it is no report"),
        ("[]", "it is no report"),
        ("[" * 100_000, "it is no report"),
        ("{}", "it is no report"),
        (report().to_json()[:-100], "it is no report"),
        (edited(lambda told: told.update(weights="another")), "it is damaged, or was edited"),
        (edited(lambda told: told["figures"]["kl"].update(value=0.009)), "it is damaged, or was edited"),
        (edited(lambda told: told["thresholds"].update(kl=9.0)), "it is damaged, or was edited"),
        (edited(lambda told: told.update(kvtier_quality=2)), "another version of kvtier wrote it"),
        (edited(lambda told: told.update(more=1)), "it is no report"),
        (resealed(lambda told: told["figures"]["kl"].update(high=math.nan)), "nan is no figure"),
        (resealed(lambda told: told["figures"]["kl"].update(high=0.001)), "kl cannot be 0.008, 0.01, 0.001"),
        (resealed(lambda told: told["figures"]["kl"].update(low=-3)), "kl cannot be -3"),
        (resealed(lambda told: told["figures"]["top1"].update(high=5.0)), "top1 cannot be"),
        (resealed(lambda told: told.update(recall=9)), "recall is no share"),
        (resealed(lambda told: told.update(weights=["a"])), "weights is no text"),
        (resealed(lambda told: told["thresholds"].update(kl=math.inf)), "inf is no figure"),
        (resealed(lambda told: told["figures"]["top1"].update(low="1")), "it is no report"),
    ],
)
def test_an_incomplete_report_is_refused(tmp_path, text, why):
    with pytest.raises(ReportRefused, match=why):
        Report.read(written(tmp_path / "report.json", text))


def test_a_file_that_is_not_there_is_reported(tmp_path):
    with pytest.raises(ReportRefused, match="it cannot be read: No such file or directory"):
        Report.read(tmp_path / "report.json")
