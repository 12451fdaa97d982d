"""`kvtier quality`: how far a model's answers differ after a codec, in a report that lets a tier with it open."""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import yaml

from kvtier_core.cli.output import FINE, PROBLEMS, Output, table
from kvtier_core.config.load import load_config
from kvtier_core.config.quality import Estimate, Figures, Report, Thresholds
from kvtier_core.config.registry import Registry
from kvtier_core.errors import BackendError
from kvtier_core.frames.identity import CodecIdentity, identity_of
from kvtier_vllm.quality.prompts import our_texts, read_texts
from kvtier_vllm.quality.statistics import Place, compare, finds

#: Facts of the namespace that say what was measured with.
_VERSIONS = ("engine", "plugins")
_THRESHOLDS = {
    "kl": "the highest mean KL divergence, in nats per token",
    "top1": "the lowest share of positions with the same most likely token",
    "perplexity": "the share by which the perplexity may rise",
    "lost": "the share of needles that may be lost",
    "recall": "the lowest share of needles that the model finds by itself",
}


def add_to(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "quality",
        help="measure how much a lossy codec changes a model's answers",
        description="Run a model on vLLM three times: it computes every prompt, it gets each prefix back unchanged, "
        "and it gets each prefix back through the codec. A tier with a lossy codec names the report.",
        epilog="Arguments after -- are vLLM's own: pass those that you serve with, such as --dtype bfloat16.",
    )
    parser.add_argument("--model", required=True, help="the folder of a model")
    parser.add_argument("--codec", required=True, help="as in the file: kivi, or '{type: kivi, bits: 4}'")
    parser.add_argument("--out", type=Path, default=Path("quality.json"), help="the report; default: quality.json")
    parser.add_argument("--prompts", type=Path, help="texts of your own: a text file, or JSONL with the key text")
    parser.add_argument("--tokens", type=int, default=768, help="tokens of each prompt; default: 768")
    parser.add_argument("--continuation", type=int, default=64, help="tokens after each prompt; default: 64")
    parser.add_argument("--weights", default="full", help="how the weights are identified: full, sampled or name:…")
    parser.add_argument("--folder", type=Path, help="for the KV of all prompts while it runs; default: a temporary one")
    parser.add_argument(
        "--memory", default="4GiB", help="size of the arena: room for the KV of a few prompts; default: 4GiB"
    )
    add_thresholds(parser)
    parser.add_argument("engine", nargs="*", help=argparse.SUPPRESS)
    parser.set_defaults(run=run)


def add_thresholds(parser: argparse.ArgumentParser) -> None:
    """Add an option for each threshold; `thresholds_of` returns them."""
    for name, meaning in _THRESHOLDS.items():
        default = getattr(Thresholds(), name)
        parser.add_argument(f"--{name}", type=float, default=default, help=f"{meaning}; default: {default:g}")


def thresholds_of(options: argparse.Namespace) -> Thresholds:
    return Thresholds(**{name: getattr(options, name) for name in _THRESHOLDS})


def run(options: argparse.Namespace, output: Output) -> int:
    """A table of the figures, and the verdict. Raises BackendError or ConfigError if nothing could be measured."""
    try:
        serializer = yaml.safe_load(options.codec)
    except yaml.YAMLError as error:
        raise BackendError(f"cannot read --codec {options.codec!r}: {error}") from error
    for folder in (options.out.parent, options.folder or Path()):
        if not folder.is_dir():  # reported now, not after an hour of measuring
            raise BackendError(f"folder {folder} does not exist")
    if importlib.util.find_spec("kvtier_vllm") is None:
        raise BackendError("the engine, vLLM, is not installed; pip install 'kvtier[vllm]'")
    texts = read_texts(options.prompts) if options.prompts else our_texts()
    with tempfile.TemporaryDirectory(prefix="kvtier-quality-", dir=options.folder) as folder:
        measuring = Measuring(options, Path(folder), serializer, texts)
        codec = measuring.codec()
        output.warn("1 of 3: an engine computes every prompt")
        computed = measuring.run("kv_producer", "raw", "codec")
        output.warn("2 of 3: an engine gets each prefix back unchanged")
        control = measuring.run("kv_consumer", "raw")
        output.warn("3 of 3: an engine gets each prefix back through the codec")
        coded = measuring.run("kv_consumer", "codec")
    report = Report(
        weights=computed.facts["weights"],
        codec=codec.type,
        codec_digest=codec.digest.hex(),
        figures=computed.differences(coded),
        control=computed.differences(control),
        recall=computed.recall,
        thresholds=thresholds_of(options),
        about=_about(measuring, computed, control, coded),
    )
    options.out.write_text(report.to_json(), "utf-8")
    output.value = json.loads(report.to_json())
    _say(report, options.out, output)
    return PROBLEMS if report.failures else FINE


@attrs.frozen
class Scored:
    """The answers of one run."""

    facts: Mapping[str, str]  #: of the engine's namespace
    chunk_tokens: int
    depths: Sequence[float | None]  #: for each prompt, that of its needle
    answers: Sequence[Sequence[Place]]

    @classmethod
    def of(cls, told: Mapping[str, Any]) -> Scored:
        """Of the JSON of `kvtier_vllm.quality.scoring`."""
        answers = [[_place(place) for place in each["places"]] for each in told["answers"]]
        return cls(told["facts"], told["chunk_tokens"], told["depths"], answers)

    @property
    def needles(self) -> list[bool]:
        """For each prompt, whether it hides a needle."""
        return [depth is not None for depth in self.depths]

    @property
    def recall(self) -> float:
        """The share of the needles that were found."""
        return self.found_at(self.depths) / max(1, sum(self.needles))

    def differences(self, other: Scored) -> Figures:
        """The figures of another run, if this one computed everything."""
        return compare(self.answers, other.answers, self.needles)

    def found_at(self, depths: Sequence[float | None]) -> int:
        """How many needles at these depths were found."""
        return sum(
            finds(places)
            for depth, places in zip(self.depths, self.answers, strict=True)
            if depth is not None and depth in depths
        )


@attrs.frozen
class Measuring:
    """Engines, one after another, over the stores in a folder."""

    options: argparse.Namespace
    folder: Path
    serializer: Any  #: as in YAML
    texts: Sequence[str]

    def codec(self) -> CodecIdentity:
        """Its identity. Raises ConfigError if there is no such codec."""
        return identity_of(load_config(self._stack("codec"), Registry.discover(), "--codec").stores[0].serializer)

    def run(self, role: str, *stores: str) -> Scored:
        """The answers of an engine that stores everything, or loads everything. Raises BackendError."""
        options = self.options
        told = self.score(
            {
                "model": options.model,
                "arguments": options.engine,
                "role": role,
                "stack": self._stack(*stores),
                "texts": self.texts,
                "tokens": options.tokens,
                "follow": options.continuation,
            }
        )
        check_found(told, stores[0], all_of_it=role == "kv_consumer")
        return Scored.of(told)

    def score(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        """Ask an engine in a process of its own. Raises BackendError."""
        return ask_process("kvtier_vllm.quality.scoring", asked, self.folder)

    def _stack(self, *stores: str) -> dict[str, Any]:
        """An arena over these stores. A consumer stores nothing, so its arena holds only what came from the store."""
        serializers = {"raw": "raw", "codec": self.serializer}
        tiers: list[dict[str, Any]] = [{"type": "cpu", "capacity": self.options.memory}]
        tiers += [
            {
                "type": "disk",
                "path": str(self.folder / store),
                "capacity": "1TiB",  # what the prompts need is not known
                "inflight": self.options.memory,
                "timeout": "10min",
                "serializer": serializers[store],
                "accept_quality": "unmeasured",
            }
            for store in stores
        ]
        identity = {"weights": self.options.weights}
        return {
            "version": 1,
            "load": "always",
            "load_wait": "10min",
            "status": "off",
            "identity": identity,
            "tiers": tiers,
        }


def ask_process(module: str, asked: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """What the program ``module``, an engine, answers, as `scoring.serve` does. Raises BackendError."""
    into = folder / "answers.json"
    done = subprocess.run(
        [sys.executable, "-m", module],
        input=json.dumps({**asked, "into": str(into)}),
        # Its scheduler is in that process, which waits until what it stores has arrived.
        env={**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
        capture_output=True,
        encoding="utf-8",
        errors="replace",
    )
    if done.returncode:
        raise BackendError(f"the engine failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return json.loads(into.read_bytes())


def check_found(told: Mapping[str, Any], where: str, *, all_of_it: bool) -> None:
    """Raise BackendError unless every whole chunk of every prompt was found, or none if all was to be computed."""
    size = told["chunk_tokens"]
    for tokens, answer in zip(told["prompt_tokens"], told["answers"], strict=True):
        expected = (tokens - 1) // size * size if all_of_it else 0
        if not expected <= answer["found"] <= (tokens if expected else 0):
            why = f"{answer['found']} of {tokens} tokens of a prompt were found in {where}, not {expected}"
            raise BackendError(f"nothing was measured: {why}; a larger --memory may help")
        if all_of_it and not expected:
            why = f"a prompt of {tokens} tokens has no whole chunk of {size}"
            raise BackendError(f"nothing was measured: {why}; increase --tokens")


def _place(told: Mapping[str, Any]) -> Place:
    return Place({int(token): logprob for token, logprob in told["top"].items()}, told["told"], told["told_logprob"])


def measured_with(options: argparse.Namespace, texts: Sequence[str], computed: Scored) -> dict[str, Any]:
    """What was measured, and with what; for people."""
    windows = [answer for answer, needle in zip(computed.answers, computed.needles, strict=True) if not needle]
    return {
        "model": options.model,
        "engine_arguments": list(options.engine),
        "versions": {
            "kvtier": importlib.metadata.version("kvtier"),
            **{name: computed.facts[name] for name in _VERSIONS},
        },
        "chunk_tokens": computed.chunk_tokens,
        "texts_digest": hashlib.blake2b("\0".join(texts).encode(), digest_size=16).hexdigest(),
        "windows": len(windows),
        "places": sum(map(len, windows)),
    }


def _about(measuring: Measuring, computed: Scored, control: Scored, coded: Scored) -> dict[str, Any]:
    depths = sorted({depth for depth in computed.depths if depth is not None})
    return {
        "serializer": measuring.serializer,
        "prompt_tokens": measuring.options.tokens,
        **measured_with(measuring.options, measuring.texts, computed),
        "needles": [
            {
                "depth": depth,
                "asked": computed.depths.count(depth),
                "computed": computed.found_at([depth]),
                "control": control.found_at([depth]),
                "codec": coded.found_at([depth]),
            }
            for depth in depths
        ],
    }


def _say(report: Report, file: Path, output: Output) -> None:
    about, limits = report.about, report.thresholds
    output.say(
        f"{report.codec} {report.codec_digest[:8]} for the weights {report.weights[:16]}…: {about['windows']} windows, "
        f"{about['places']} places, {sum(each['asked'] for each in about['needles'])} needles; "
        f"chunks of {about['chunk_tokens']} tokens",
        "",
    )
    rows = [
        _row("mean KL divergence, nat", "kl", report, "{:.4f}", f"high end <= {limits.kl:g}"),
        _row("top-1 agreement", "top1", report, "{:.1%}", f"low end >= {limits.top1:.1%}"),
        _row("change of perplexity", "perplexity", report, "{:+.2%}", f"high end <= {limits.perplexity:.1%}"),
        _row("needles lost", "lost", report, "{:.1%}", f"<= {limits.lost:.1%}"),
    ]
    output.say(*table(("", "without the codec", "with it", "threshold"), rows, left=1), "")
    needles = [
        [f"{each['depth']:.0%}", *(f"{each[run]}/{each['asked']}" for run in ("computed", "control", "codec"))]
        for each in about["needles"]
    ]
    output.say(*table(("needles at depth", "computed", "without the codec", "with it"), needles, left=1), "")
    for failure in report.failures:
        output.say(output.paint(f"failed: {failure}", "bad"))
    verdict = "failed" if report.failures else output.paint("passed", "good")
    output.say(f"{verdict}: {file}")


def _row(name: str, figure: str, report: Report, form: str, limit: str) -> list[str]:
    return [name, *(shown(getattr(run, figure), form) for run in (report.control, report.figures)), limit]


def shown(estimate: Estimate, form: str) -> str:
    """The figure and its interval, each in this ``form`` of `str.format`."""
    return f"{form.format(estimate.value)} [{form.format(estimate.low)}, {form.format(estimate.high)}]"
