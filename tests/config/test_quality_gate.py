"""A tier with a lossy codec opens for the model and the codec of a report that passed, or where that is waived."""

from __future__ import annotations

import json
import logging
from typing import ClassVar

import attrs
import pytest
from machine import LAYOUT
from serializing import LossyConfig, XorConfig
from test_quality_report import report

import kvtier_disk.plugin
from kvtier_core.cli import main
from kvtier_core.cli.output import FINE, PROBLEMS
from kvtier_core.config.load import load_config
from kvtier_core.config.open import open_stack, open_tier
from kvtier_core.config.quality import Estimate
from kvtier_core.config.registry import Registry
from kvtier_core.errors import ConfigError
from kvtier_core.frames.identity import identity_of
from kvtier_core.hookspecs import hookimpl
from kvtier_core.interfaces import OpenContext
from kvtier_core.types import Namespace
from kvtier_simulate.dry_run import Clock, open_dry_run

CONTEXT = OpenContext(Namespace.of({"weights": "a digest"}), LAYOUT)
RUN = "run kvtier quality --model FOLDER --codec '{type: few, bits: 4}' --out FILE, and write quality: FILE"


@attrs.frozen
class FewConfig(LossyConfig):
    type: ClassVar[str] = "few"
    bits: int = 4


class Codecs:
    @hookimpl
    def kvtier_serializers(self):
        return [FewConfig, XorConfig]


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Writes a file whose second tier has this serializer and these settings, and returns its configuration."""
    monkeypatch.chdir(tmp_path)
    found = Registry.of(kvtier_disk.plugin, Codecs())
    monkeypatch.setattr(Registry, "discover", lambda: found)

    def write(serializer="few", settings=""):
        disk = f"{{type: disk, path: store, capacity: 1GiB, min_free: 0B, serializer: {serializer}{settings}}}"
        tiers = f"  - {{type: heap, capacity: 4MiB}}\n  - {disk}\n"
        (tmp_path / "kvtier.yaml").write_text(f"version: 1\nchunk_tokens: {LAYOUT.tokens}\ntiers:\n{tiers}")
        return load_config("kvtier.yaml", found)

    return write


@pytest.fixture
def measured(tmp_path):
    """Writes report.json, of this model and of `few` with its defaults unless something else is named."""

    def measured(serializer=None, **others):
        codec = identity_of(serializer or FewConfig())
        told = attrs.evolve(report(), codec=codec.type, codec_digest=codec.digest.hex(), **others)
        (tmp_path / "report.json").write_text(told.to_json())
        return told

    return measured


def problem_of(config, ctx=CONTEXT):
    with pytest.raises(ConfigError) as caught:
        open_stack(config, ctx)
    (problem,) = caught.value.problems
    return problem


def test_without_a_report_a_lossy_codec_does_not_open(write):
    problem = problem_of(write())
    assert problem.path == "$.tiers[1].serializer"
    assert problem.why.endswith("lossy: answers may differ, and no report says how much")
    assert problem.hint == f"{RUN}, or accept_quality: unmeasured"


def test_a_report_that_passed_opens_it_and_is_reported(write, measured, caplog):
    told = measured()
    with caplog.at_level(logging.WARNING, "kvtier"):
        manager = open_stack(write(settings=", quality: report.json"), CONTEXT)
    manager.close()
    (line,) = caplog.messages
    assert line.startswith("kvtier: disk: answers may differ: few ")
    assert line.endswith(f"{told} (report.json)")
    assert "lossy: answers may differ" in manager.describe()[1]


@pytest.mark.parametrize(
    ("serializer", "others", "why"),
    [
        (None, {"weights": "others"}, "it is for the weights 'others', but the engine has 'a digest'"),
        (FewConfig(bits=2), {}, "it is for few "),
        (XorConfig(), {}, "it is for xor "),
        (None, {"recall": 0.1}, "the codec did not pass: "),
    ],
)
def test_a_report_that_does_not_count_says_why(write, measured, serializer, others, why):
    measured(serializer, **others)
    problem = problem_of(write(settings=", quality: report.json"))
    assert problem.path == "$.tiers[1].quality"
    assert problem.why.startswith(f"report.json is not accepted: {why}")
    assert problem.hint == RUN


def test_of_an_engine_whose_weights_are_not_known_no_report_counts(write, measured):
    measured()
    problem = problem_of(write(settings=", quality: report.json"), OpenContext(Namespace.of({}), LAYOUT))
    assert "but the engine has ''" in problem.why


def test_weights_that_are_named_count_by_their_name(write, measured):
    measured(weights="name:ours")
    ctx = OpenContext(Namespace.of({"weights": "name:ours"}), LAYOUT)
    open_stack(write(settings=", quality: report.json"), ctx).close()


def test_packing_above_a_codec_does_not_change_its_report(write, measured):
    """The serializer gets the same values, though frames of the two are not interchangeable."""
    measured()
    packed = attrs.evolve(CONTEXT, layout=attrs.evolve(LAYOUT, packed=True))
    config = write(settings=", quality: report.json")
    codecs = []
    for ctx in (CONTEXT, packed):
        with open_tier(config, 1, ctx) as disk:
            codecs.append(disk.codec.identity)
        open_stack(config, ctx).close()
    assert codecs[0] != codecs[1]


def test_a_lossy_codec_may_be_accepted_unmeasured(write, caplog):
    open_stack(write(settings=", accept_quality: unmeasured"), CONTEXT).close()
    assert caplog.messages[0].endswith("lossy; not measured (accept_quality: unmeasured)")


@pytest.mark.parametrize("settings", [", accept_quality: yes", ", accept_quality: unmeasured, quality: report.json"])
def test_a_report_and_accept_quality_exclude_each_other(write, settings):
    with pytest.raises(ConfigError, match="accept_quality"):
        write(settings=settings)


def test_a_lossless_codec_needs_no_report(write, caplog):
    manager = open_stack(write("xor"), CONTEXT)
    manager.close()
    assert not caplog.messages
    assert "differ" not in manager.describe()[1]


def test_commands_that_examine_tiers_need_no_report(write):
    config = write()
    with open_tier(config, 0, CONTEXT), open_tier(config, 1, CONTEXT) as opened:
        assert opened.tier.name == "disk"
    open_dry_run(config, LAYOUT, Clock()).close()
    assert main(["fsck", "disk", "--config", "kvtier.yaml"]) == FINE
    assert main(["bench", "kvtier.yaml", "--frames", "2"]) == FINE


def test_check_tells_what_an_engine_would_be_told(write, measured, capsys):
    write()
    assert main(["check", "kvtier.yaml"]) == PROBLEMS
    assert "no report says how much" in capsys.readouterr().err
    told = measured(weights="of whatever engine")
    write(settings=", quality: report.json")
    assert main(["check", "kvtier.yaml"]) == FINE
    assert f"{told} (report.json)" in capsys.readouterr().out.splitlines()[-1]
    measured(figures=attrs.evolve(told.figures, kl=Estimate(0.1, 0.1, 0.1)))
    assert main(["check", "kvtier.yaml"]) == PROBLEMS
    assert "the codec did not pass" in capsys.readouterr().err
    write("xor")
    assert main(["check", "kvtier.yaml", "--json"]) == FINE
    assert "quality" not in json.loads(capsys.readouterr().out)
