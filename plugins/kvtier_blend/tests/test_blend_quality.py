"""`kvtier blend-quality` without an engine: its prompts, its verdict, and what a report allows."""

from __future__ import annotations

import random

import attrs
import pytest

from kvtier_blend.content_index import ContentIndex, KnownChunk, Moved
from kvtier_blend.plan import Plan, make_plan
from kvtier_blend.quality import command
from kvtier_blend.quality.prompts import prompts_of
from kvtier_blend.quality.scoring import scatter
from kvtier_blend.settings import SETTINGS, BlendSettings, read_settings
from kvtier_core.cli import main
from kvtier_core.cli.output import FINE, PROBLEMS, USAGE
from kvtier_core.config.quality import Estimate, Figures, Report, ReportRefused, Thresholds
from kvtier_core.errors import BackendError, ConfigError

CHUNK = 32
UNMEASURED = {"accept_quality": "unmeasured"}


# -- prompts -------------------------------------------------------------------------------------------


def encode(text):
    return [ord(character) for character in text]


def decode(tokens):
    return "".join(map(chr, tokens))


def texts(count=2, tokens=3000):
    """No token is in them twice."""
    drawn = random.Random(0).sample(range(1000, 20_000), count * tokens)
    return [decode(drawn[number * tokens : (number + 1) * tokens]) for number in range(count)]


def prompts(found=None, **changed):
    sizes = {"documents": 4, "tokens": 150, "follow": 10, "count": 40}
    return prompts_of(texts() if found is None else found, encode, [7], **sizes | changed)


def documents(tokens):
    """The system text, and the documents, the last of them with what follows it."""
    system, *found = decode(tokens).split("\n\n### Document\n")
    return system, found


def test_half_of_the_prompts_go_on_with_their_last_document():
    found = prompts()
    windows = [each for each in found if each.depth is None]
    assert len(windows) == 20 and len(found) == 40
    for each in windows:
        _, told = documents([*each.tokens, *each.continuation])
        assert any(told[-1] in text for text in texts())
        assert not any(set(told[-1]) & set(other) for other in told[:-1])
    followed = [token for each in windows for token in each.continuation]
    assert len(set(followed)) == len(followed) == 200, "no token is in two continuations"


def test_half_of_the_prompts_hide_a_needle_and_ask_for_it():
    needles = [each for each in prompts() if each.depth is not None]
    assert {each.depth for each in needles} == {0.125, 0.375, 0.625, 0.875}
    for each in needles:
        _, told = documents(each.tokens)
        answer = decode(each.continuation)
        assert [f"{answer}. Remember it." in document for document in told].index(True) == int(each.depth * 4)
        assert decode(each.tokens).count(answer) == 1
        assert decode(each.tokens).rpartition("\n\n")[2] + answer in decode(each.earlier)


def test_the_earlier_prompt_has_the_documents_in_another_order():
    for each in prompts():
        (system, told), (before, earlier) = documents(each.tokens), documents(each.earlier)
        if each.depth is not None:
            told[-1] = told[-1].rpartition("\n\nThe secret number")[0]
        assert system == before and system[0] == chr(7)
        assert sorted(told) == sorted(earlier) and len(set(told)) == 4
        assert told[0] != earlier[0]


@pytest.mark.parametrize("tail", [0.0, 0.25, 0.5, 0.6])
@pytest.mark.parametrize(("count", "size"), [(2, 32), (3, 64), (4, 32)])
def test_every_prompt_can_be_blended_with_every_tail(tail, count, size):
    settings = BlendSettings(**UNMEASURED, tail=tail, min_tokens=0)
    for each in prompts(documents=count):
        chunks = len(each.earlier) // size
        index = ContentIndex(size)
        index.learn(b"", each.earlier[: chunks * size], [bytes([number]) for number in range(chunks)], 0)
        known = index.find(b"", each.tokens, 0)
        plan = make_plan(known, 0, len(each.tokens), settings, chunk_tokens=size, block_tokens=size)
        assert isinstance(plan, Plan), plan


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"found": []}, "no text has 145 tokens"),
        ({"found": texts(1, 100)}, "no text has 145 tokens"),
        ({"found": texts(1, 300)}, "a text has room for 16 windows, not 20"),
        ({"found": texts(1, 700), "documents": 5}, "the texts have . other documents, fewer than 4"),
        ({"tokens": 40}, "a document of 40 tokens has no room for a needle"),
    ],
    ids=["none", "short", "few windows", "few documents", "small documents"],
)
def test_texts_that_are_too_short_are_refused(changed, why):
    with pytest.raises(BackendError, match=why):
        prompts(**changed)


def test_random_places_are_computed_in_place_of_the_tail():
    path = [b""] * 20
    chunks = tuple(Moved(number * CHUNK, KnownChunk(0, b"", path, number + 1)) for number in range(9))
    plan = Plan(0, 9 * CHUNK, chunks, ((0, 4), (50, 60)))
    found = scatter(plan, 40, b"seed")
    computed = {token for begin, end in found.runs for token in range(begin, end)}
    assert found.moved == plan.moved - 40
    assert {*range(4), *range(50, 60)} < computed < set(range(9 * CHUNK)) and len(computed) == 54
    assert all(before[1] < after[0] for before, after in zip(found.runs, found.runs[1:], strict=False))
    assert found == scatter(plan, 40, b"seed") != scatter(plan, 40, b"other")
    assert scatter(plan, 0, b"seed") == plan


# -- the command ---------------------------------------------------------------------------------------


def answers(right, found):
    """Of ten prompts with three places each; the model says what follows, or something else."""
    top = {"1": -0.1, "2": -3.0} if right else {"1": -3.0, "2": -0.1}
    return [{"found": found, "places": [{"top": top, "told": 1, "told_logprob": top["1"]}] * 3} for _ in range(10)]


@pytest.fixture
def measure(tmp_path, monkeypatch):
    """``measure(enough)`` is the command's exit code if answers differ only with a tail shorter than that."""
    monkeypatch.chdir(tmp_path)

    def run(enough):
        def score(measuring, asked):
            blended = [answers(tail >= enough, 64) for tail in asked["tails"]]
            runs = [answers(True, 0), answers(True, 64), *blended, answers(False, 64)]
            return {
                "facts": {"weights": "ours", "engine": "vllm", "plugins": ""},
                "chunk_tokens": CHUNK,
                "depths": [None] * 5 + [0.25] * 5,
                "prompt_tokens": [96] * 10,
                "runs": [{"answers": each, "moved": 480 if number > 1 else 0} for number, each in enumerate(runs)],
            }

        monkeypatch.setattr(command.Measuring, "score", score)
        return main(["blend-quality", "--model", "model", "--tails", "0.5,0,0.25", "--out", "report.json"])

    return run


def test_the_report_is_for_the_shortest_tail_that_passes(measure, tmp_path, capsys):
    file = tmp_path / "report.json"
    assert measure(enough=0.25) == FINE
    report = Report.read(file)
    assert BlendSettings(quality=file, tail=0.25, link=4).check("ours", CHUNK) == f"{report} ({file})"
    named = ["computed again", "tail 0", "tail 0.25", "tail 0.5", "random places"]
    runs = report.about["runs"]
    assert [each["run"] for each in runs] == named
    assert [each["passed"] for each in runs] == [None, False, True, True, None]
    assert [each["needles"] for each in runs] == [[5], [0], [5], [5], [0]]
    assert [each["moved"] for each in runs] == [0.0, 0.5, 0.5, 0.5, 0.5]
    told = capsys.readouterr().out
    assert "5 windows, 15 places, 5 needles; 4 documents of 256 tokens, chunks of 32" in told
    assert "passed with tail 0.25: report.json" in told


def test_if_no_tail_passes_the_report_is_for_the_longest(measure, tmp_path, capsys):
    assert measure(enough=0.75) == PROBLEMS
    assert Report.read(tmp_path / "report.json").about["tail"] == 0.5
    assert "failed with tail 0.5: the top-1 agreement may be as low as 0, less than 0.95" in capsys.readouterr().out
    with pytest.raises(ReportRefused, match="did not pass"):
        BlendSettings(quality=tmp_path / "report.json", tail=0.5).check("ours", CHUNK)


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--tails", "0,1"], "expected a share of the prompt from 0 to below 1, got 1"),
        (["--tails", "much"], "cannot use --tails much"),
        (["--link", "-1"], "expected 0 or more tokens, got -1"),
        (["--documents", "1"], "expected 2 or more"),
        (["--out", "nowhere/report.json"], "folder nowhere does not exist"),
        (["--prompts", "nowhere.txt"], "cannot read prompts from nowhere.txt"),
    ],
)
def test_what_is_wrong_is_reported_before_an_engine_starts(tmp_path, monkeypatch, capsys, arguments, why):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delattr(command.Measuring, "score")
    assert main(["blend-quality", "--model", "model", *arguments]) == USAGE
    assert why in capsys.readouterr().err


# -- what a report allows ------------------------------------------------------------------------------


SAME = Figures(Estimate(0.0, 0.0, 0.0), Estimate(1.0, 1.0, 1.0), Estimate(0.0, 0.0, 0.0), Estimate(0.0, 0.0, 0.0))


def report(**changed):
    """Of the default settings, for the weights ``ours``."""
    codec = BlendSettings(**UNMEASURED).identity(CHUNK)
    made = Report("ours", codec.type, codec.digest.hex(), figures=SAME, control=SAME, recall=1.0)
    return attrs.evolve(made, **changed)


def test_the_identity_covers_what_changes_answers():
    changed = [({}, 16), ({"tail": 0.5}, 16), ({"link": 8}, 16), ({}, 32)]
    identities = [BlendSettings(**UNMEASURED, **settings).identity(size) for settings, size in changed]
    assert len({each.digest for each in identities}) == 4
    assert BlendSettings(**UNMEASURED, min_tokens=7).identity(16) == identities[0]
    whole, real = (BlendSettings(**UNMEASURED, tail=tail).identity(16) for tail in (0, 0.0))
    assert whole == real


def test_a_report_for_the_engine_allows_blending(tmp_path):
    file = tmp_path / "report.json"
    file.write_text(report().to_json())
    assert BlendSettings(quality=file).check("ours", CHUNK) == f"{report()} ({file})"


def test_without_a_report_the_operator_says_so():
    assert BlendSettings(**UNMEASURED).check("ours", CHUNK) == "not measured (accept_quality: unmeasured)"


@pytest.mark.parametrize(
    ("text", "settings", "why"),
    [
        (report(weights="others").to_json(), {}, "it is for the weights 'others', but the engine has 'ours'"),
        (report().to_json(), {"tail": 0.0}, "it is for blend .*, but the codec is blend"),
        (report().to_json(), {"link": 0}, "it is for blend .*, but the codec is blend"),
        (report(codec="kivi").to_json(), {}, "it is for kivi"),
        (report(recall=0.1).to_json(), {}, "did not pass: the share of needles"),
        (report(thresholds=Thresholds(top1=1.1)).to_json(), {}, "did not pass: the top-1 agreement"),
        (report().to_json().replace("ours", "mine"), {}, "damaged or edited"),
        ("{}", {}, "not a report of kvtier quality"),
        (None, {}, "cannot be read"),
    ],
    ids=["weights", "tail", "link", "codec", "failed", "thresholds", "edited", "empty", "missing"],
)
def test_other_reports_do_not(tmp_path, text, settings, why):
    file = tmp_path / "report.json"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ReportRefused, match=why) as refused:
        BlendSettings(quality=file, **settings).check("ours", CHUNK)
    assert str(file) in str(refused.value)
    assert f"run kvtier blend-quality --model FOLDER --tails {settings.get('tail', 0.25):g} " in str(refused.value)


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ({}, "needs 'quality', a report of kvtier blend-quality, or 'accept_quality: unmeasured'"),
        ({"quality": "report.json", **UNMEASURED}, "'accept_quality' and 'quality' exclude each other"),
    ],
    ids=["none", "both"],
)
def test_blending_needs_a_report_or_the_operators_word(said, why):
    with pytest.raises(ConfigError, match=why):
        read_settings({SETTINGS: said})
