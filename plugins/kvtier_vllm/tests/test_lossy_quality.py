"""Real vLLM is measured behind a lossy codec, and served with the report."""

from __future__ import annotations

import gc
import json
import os
import random

import attrs
import pytest
from chunk_files import chunk_files
from real_engines import cpu_and_disk, keep_what_engines_share, prompt

from kvtier_core.cli import main
from kvtier_core.cli.output import PROBLEMS, USAGE
from kvtier_core.config.quality import Report, Thresholds
from kvtier_vllm.quality import command as quality

#: As installed: the engines that are measured run in processes of their own.
PLUGIN = '''\
from typing import ClassVar
import attrs
from kvtier_core.hookspecs import hookimpl
from kvtier_core.interfaces import Serializer, SerializerConfig

@attrs.frozen
class FewConfig(SerializerConfig):
    """Keeps the upper two bytes of a float32, of these without some bits."""

    type: ClassVar[str] = "few"
    lossless: ClassVar[bool] = False
    without: int = 4

    def open(self, ctx):
        return Few(0xFF << self.without & 0xFF)

class Few(Serializer):
    def __init__(self, mask):
        self.table = bytes(byte & mask for byte in range(256))

    def bound(self, layout):
        return layout.payload_nbytes

    def encode(self, payload, into):
        kept = bytearray(len(payload))
        kept[2::4] = bytes(payload[2::4]).translate(self.table)
        kept[3::4] = payload[3::4]
        into[: len(kept)] = kept
        return len(kept)

    def decode(self, encoded, into):
        into[: len(encoded)] = encoded
        return len(encoded)

@hookimpl
def kvtier_serializers():
    return [FewConfig]
'''


def install(folder, monkeypatch):
    info = folder / "kvtier_few-0.1.0.dist-info"
    info.mkdir(parents=True)
    (folder / "kvtier_few.py").write_text(PLUGIN)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: kvtier-few\nVersion: 0.1.0\n")
    (info / "entry_points.txt").write_text("[kvtier.v1]\nfew = kvtier_few\n")
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]))


def texts(file, count, words):
    drawn = random.Random(0)
    lines = [{"text": " ".join(f"w{drawn.randrange(10, 2000)}" for _ in range(words))} for _ in range(count)]
    file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return str(file)


@pytest.fixture
def command(model, with_words, tmp_path, monkeypatch):
    """`kvtier quality` with this codec; its engines start in this process, in two seconds and not in twenty."""
    install(tmp_path / "site", monkeypatch)

    def score(measuring, asked):
        from kvtier_vllm.quality import scoring

        try:
            return json.loads(json.dumps(scoring.score(scoring.Run(**asked))))
        finally:
            gc.collect()
            keep_what_engines_share()

    monkeypatch.setattr(quality.Measuring, "score", score)
    words = ["--model", str(model), "--codec", "{type: few, without: 6}", "--out", str(tmp_path / "report.json")]
    words += ["--prompts", texts(tmp_path / "texts.jsonl", 2, 340), "--tokens", "300", "--continuation", "8"]
    words += ["--memory", "64MiB", "--", "--tokenizer", with_words["tokenizer"], "--dtype", "float32"]
    words += ["--enforce-eager", "--max-model-len", "2048", "--kv-cache-memory-bytes", str(64 << 20)]
    return lambda: main(["quality", *words])


@pytest.mark.more
def test_a_codec_is_measured_and_opens_with_its_report(engine, command, tmp_path, capsys, said):
    report = tmp_path / "report.json"
    assert command() == PROBLEMS
    assert "failed: the share of needles that the model itself finds is 0," in capsys.readouterr().out
    found = Report.read(report)
    assert found.about["windows"] == 10
    assert found.control.kl.value < 1e-4
    assert found.control.top1.value == 1.0
    assert found.figures.kl.value > 100 * max(found.control.kl.value, 1e-6), "nothing came through the codec"
    lax = Thresholds(kl=99.0, top1=0.0, perplexity=99.0, lost=1.0, recall=0.0)
    report.write_text(attrs.evolve(found, thresholds=lax).to_json())
    stack = cpu_and_disk(tmp_path / "store")
    stack["tiers"][1] |= {"serializer": {"type": "few", "without": 6}, "quality": str(report)}
    asked = prompt(70, 300)
    with engine(stack) as served:
        served.ask(asked)
        served.settle()
    said()
    with engine(stack) as served:
        assert any(line.startswith("kvtier: disk: answers may differ: few ") for line in said())
        served.ask(asked)
        (line,) = [line for line in said() if " from kvtier" in line]
        assert ": 300 tokens: 256 from kvtier (disk 256; lossy: the answer may differ), 44 computed" in line
        served.assert_at_rest()


def test_a_chunk_that_does_not_come_back_ends_the_measurement(command, tmp_path, monkeypatch, capsys):
    score = quality.Measuring.score

    def without_a_frame(measuring, asked):
        if asked["role"] == "kv_consumer":
            chunk_files(measuring.folder / "raw")[0].unlink()
        return score(measuring, asked)

    monkeypatch.setattr(quality.Measuring, "score", without_a_frame)
    assert command() == USAGE
    assert "nothing was measured: 0 of 300 tokens of a prompt were found in raw" in capsys.readouterr().err
    assert not (tmp_path / "report.json").exists()
