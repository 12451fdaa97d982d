"""Real vLLM is measured while it blends, and blends only with the report."""

from __future__ import annotations

import gc
import json

import attrs
import pytest
from real_engines import BLOCK, CHUNK, cpu, keep_what_engines_share, prompt
from test_lossy_quality import texts

from kvtier_blend.quality import command as quality
from kvtier_blend.settings import SALT, SETTINGS, WORD
from kvtier_core.cli import main
from kvtier_core.cli.output import PROBLEMS, USAGE
from kvtier_core.config.quality import Report, Thresholds


@pytest.fixture
def measure(model, with_words, tmp_path, monkeypatch):
    """`kvtier blend-quality`, whose engine starts in this process, in two seconds and not in twenty."""

    def score(measuring, asked):
        from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown

        from kvtier_blend.quality import scoring

        try:
            return json.loads(json.dumps(scoring.score(scoring.Run(**asked))))
        finally:
            ensure_kv_transfer_shutdown()
            gc.collect()
            keep_what_engines_share()

    monkeypatch.setattr(quality.Measuring, "score", score)
    words = ["--model", str(model), "--out", str(tmp_path / "report.json"), "--memory", "64MiB"]
    words += ["--prompts", texts(tmp_path / "texts.jsonl", 3, 500), "--continuation", "8", "--count", "6"]
    words += ["--documents", "3", "--tokens", "150", "--tails", "0,0.25", "--chunk-tokens", str(CHUNK)]
    words += ["--", "--tokenizer", with_words["tokenizer"], "--dtype", "float32", "--block-size", str(BLOCK)]
    words += ["--enforce-eager", "--max-model-len", "2048", "--kv-cache-memory-bytes", str(64 << 20)]
    return lambda: main(["blend-quality", *words])


@pytest.fixture
def blended(engine, said):
    """``blended(settings)`` is the hit line of a prompt that may be blended, and what is logged before it."""
    system, first, second = prompt(80, 20), prompt(81, 200), prompt(82, 200)

    def ask(settings):
        said()
        with engine(cpu() | {SETTINGS: settings}, kv_connector="KVTierBlendConnector") as served:
            served.ask([*system, *first, *second])
            served.settle()
            served.ask([*system, *second, *first], salt=SALT, parameters={WORD: True})
            served.assert_at_rest()
        lines = said()
        return next(line for line in reversed(lines) if " from kvtier" in line), lines

    return ask


def test_blending_is_measured_and_allowed_by_its_report(measure, blended, tmp_path, capsys):
    file = tmp_path / "report.json"
    assert measure() == PROBLEMS
    assert "the share of needles that the model itself finds is 0," in capsys.readouterr().out
    found = Report.read(file)
    again, without, with_tail, scattered = found.about["runs"]
    assert (found.about["tail"], found.about["windows"], found.about["needles"]) == (0.25, 3, [1, 1, 1])
    assert found.control.kl.value < 1e-4 and found.control.top1.value == 1.0
    assert again["moved"] == 0 < with_tail["moved"] == scattered["moved"] < without["moved"]
    assert without["kl"]["value"] > with_tail["kl"]["value"] > 10 * max(found.control.kl.value, 1e-6)
    settings = {"quality": str(file), "link": 4, "tail": 0.25, "min_tokens": 0}
    line, said = blended(settings)
    assert f"; not blended: {file} is not accepted: the codec did not pass" in line
    assert any(each.startswith(f"kvtier: no request is blended: {file} is not accepted") for each in said)
    lax = Thresholds(kl=99.0, top1=0.0, perplexity=99.0, lost=1.0, recall=0.0)
    file.write_text(attrs.evolve(found, thresholds=lax).to_json())
    line, said = blended(settings)
    assert "; blended: " in line and "the answer may differ" in line
    assert any(line.endswith(f"needles lost 0.0% ({file})") for line in said)
    line, _ = blended({**settings, "tail": 0.5})
    assert "; not blended: " in line and "it is for blend " in line


def test_a_prompt_that_is_not_blended_ends_the_measurement(measure, tmp_path, monkeypatch, capsys):
    from kvtier_blend.content_index import ContentIndex

    monkeypatch.setattr(ContentIndex, "find", lambda *asked: [])
    assert measure() == USAGE
    assert "nothing was measured: 0 of 6 prompts were blended" in capsys.readouterr().err
    assert not (tmp_path / "report.json").exists()
