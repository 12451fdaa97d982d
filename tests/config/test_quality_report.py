"""The report of `kvtier quality` comes back from its file as it was, or says why it does not count."""

from __future__ import annotations

import json
import math

import attrs
import pytest

from kvtier_core.config.quality import Estimate, Figures, Report, ReportRefused, Thresholds
from kvtier_core.frames.identity import CodecIdentity

CODEC = CodecIdentity("kivi", bytes(range(32)), lossless=False)


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
        (figures(kl=Estimate(0.04, 0.03, 0.051)), "the mean KL divergence may be as high as 0.051, more than 0.05"),
        (figures(top1=Estimate(0.97, 0.949, 0.98)), "the top-1 agreement may be as low as 0.949, less than 0.95"),
        (figures(perplexity=Estimate(0.01, 0.0, 0.021)), "the perplexity may rise by as much as 0.021, more than 0.02"),
        (figures(lost=Estimate(0.06, 0.0, 0.1)), "needles are lost: 0.06, more than 0.05"),
        ({"recall": 0.4}, "the share of needles that the model itself finds is 0.4, less than 0.5"),
    ],
)
def test_the_pessimistic_end_of_an_interval_counts(changed, why):
    told = attrs.evolve(report(), **changed)
    assert told.failures == [why]
    with pytest.raises(ReportRefused, match=f"the codec did not pass: {why}"):
        told.check("a digest", CODEC)


def test_a_report_of_something_else_does_not_count():
    with pytest.raises(ReportRefused, match="it is for the weights 'a digest', but the engine has 'another'"):
        report().check("another", CODEC)
    with pytest.raises(ReportRefused, match="it is for kivi 00010203, but the codec is kivi ffffffff, lossy"):
        report().check("a digest", attrs.evolve(CODEC, digest=b"\xff" * 32))
    with pytest.raises(ReportRefused, match="but the codec is fp8"):
        report().check("a digest", attrs.evolve(CODEC, type="fp8"))


def edited(change):
    content = json.loads(report().to_json())
    change(content)
    return json.dumps(content)


def resealed(change):
    """As by somebody who knows how the checksum is made, and writes nonsense."""
    from kvtier_core.config import quality as module

    content = json.loads(edited(change))
    content["checksum"] = module._checksum({name: each for name, each in content.items() if name != "checksum"})
    return json.dumps(content)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "not a report"),
        ("[]", "not a report"),
        ("[" * 100_000, "not a report"),
        ("{}", "not a report"),
        (report().to_json()[:-100], "not a report"),
        (edited(lambda told: told.update(weights="another")), "damaged or edited"),
        (edited(lambda told: told["figures"]["kl"].update(value=0.009)), "damaged or edited"),
        (edited(lambda told: told["thresholds"].update(kl=9.0)), "damaged or edited"),
        (edited(lambda told: told.update(kvtier_quality=2)), "written by another version of kvtier"),
        (edited(lambda told: told.update(more=1)), "not a report"),
        (resealed(lambda told: told["figures"]["kl"].update(high=math.nan)), "nan is not a finite number"),
        (resealed(lambda told: told["figures"]["kl"].update(high=0.001)), "invalid kl: 0.008, 0.01, 0.001"),
        (resealed(lambda told: told["figures"]["kl"].update(low=-3)), "invalid kl: -3"),
        (resealed(lambda told: told["figures"]["top1"].update(high=5.0)), "invalid top1: "),
        (resealed(lambda told: told.update(recall=9)), "recall is not between 0 and 1"),
        (resealed(lambda told: told.update(weights=["a"])), "weights is not a string"),
        (resealed(lambda told: told["thresholds"].update(kl=math.inf)), "inf is not a finite number"),
        (resealed(lambda told: told["figures"]["top1"].update(low="1")), "not a report"),
    ],
)
def test_an_incomplete_report_is_refused(tmp_path, text, why):
    with pytest.raises(ReportRefused, match=why):
        Report.read(written(tmp_path / "report.json", text))


def test_a_file_that_is_not_there_is_reported(tmp_path):
    with pytest.raises(ReportRefused, match="cannot be read: No such file or directory"):
        Report.read(tmp_path / "report.json")
