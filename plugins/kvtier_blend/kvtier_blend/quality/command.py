"""`kvtier blend-quality`: how far a model's answers differ when prompts are blended, in a report that allows it."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from kvtier_core.cli.output import FINE, PROBLEMS, Output, table
from kvtier_core.config.quality import Estimate, Figures, Report
from kvtier_core.errors import BackendError
from kvtier_vllm.quality.command import (
    Scored,
    add_thresholds,
    ask_process,
    check_found,
    measured_with,
    shown,
    thresholds_of,
)
from kvtier_vllm.quality.prompts import our_texts, read_texts

if TYPE_CHECKING:
    from kvtier_blend.settings import BlendSettings  # imports vLLM

#: How the figures of a run are printed.
_FORMS = {"kl": "{:.4f}", "top1": "{:.1%}", "perplexity": "{:+.2%}"}


def add_to(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "blend-quality",
        help="measure how much blending changes a model's answers",
        description="Run a model on vLLM over prompts of several documents: it computes them, loads them unchanged, "
        "and blends them from prompts with another order of the documents, with each tail. The settings of blending "
        "name the report, which is for the shortest tail that passes.",
        epilog="Arguments after -- are vLLM's own: pass those that you serve with, such as --dtype bfloat16.",
    )
    parser.add_argument("--model", required=True, help="the folder of a model")
    parser.add_argument("--tails", default="0,0.25,0.5", help="shares of a prompt; default: 0,0.25,0.5")
    parser.add_argument("--link", type=int, default=4, help="computed tokens of each moved run; default: 4")
    parser.add_argument("--chunk-tokens", type=_chunk_tokens, default="auto", help="as in the file; default: auto")
    parser.add_argument("--out", type=Path, default=Path("blend.json"), help="the report; default: blend.json")
    parser.add_argument("--prompts", type=Path, help="texts of your own: a text file, or JSONL with the key text")
    parser.add_argument("--count", type=int, default=100, help="number of prompts; default: 100")
    parser.add_argument("--documents", type=int, default=4, help="documents of each prompt; default: 4")
    parser.add_argument("--tokens", type=int, default=256, help="tokens of each document; default: 256")
    parser.add_argument("--continuation", type=int, default=32, help="tokens after each prompt; default: 32")
    parser.add_argument("--weights", default="full", help="how the weights are identified: full, sampled or name:…")
    parser.add_argument(
        "--memory", default="4GiB", help="size of the arena: room for the KV of 16 prompts; default: 4GiB"
    )
    add_thresholds(parser)
    parser.add_argument("engine", nargs="*", help=argparse.SUPPRESS)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace, output: Output) -> int:
    """A row for each run, and the verdict. Raises BackendError or ConfigError if nothing could be measured."""
    if not options.out.parent.is_dir():  # reported now, not after an hour of measuring
        raise BackendError(f"folder {options.out.parent} does not exist")
    if options.documents < 2 or options.count < 2:
        raise BackendError("expected 2 or more, for --documents and for --count")
    texts = read_texts(options.prompts) if options.prompts else our_texts()
    settings = _settings(options)
    output.warn(f"an engine computes {options.count} prompts, loads them, and blends them with each tail")
    with tempfile.TemporaryDirectory(prefix="kvtier-quality-") as folder:
        computed, again, *blended, scattered = Measuring(options, Path(folder), texts).runs(settings)
    reports = [_report(options, *each, computed, again) for each in zip(settings, blended, strict=True)]
    passed = [number for number, report in enumerate(reports) if not report.failures]
    chosen = passed[0] if passed else len(reports) - 1
    about = {
        "tail": settings[chosen].tail,
        "link": options.link,
        "documents": options.documents,
        "document_tokens": options.tokens,
        "needles": [computed.scored.depths.count(depth) for depth in _depths(computed.scored)],  # by document
        **measured_with(options, texts, computed.scored),
        "runs": [
            _told("computed again", again, reports[0].control),
            *(
                _told(f"tail {each.tail:g}", found, report.figures, not report.failures)
                for each, found, report in zip(settings, blended, reports, strict=True)
            ),
            _told("random places", scattered, computed.scored.differences(scattered.scored)),
        ],
    }
    report = attrs.evolve(reports[chosen], about=about)
    options.out.write_text(report.to_json(), "utf-8")
    output.value = json.loads(report.to_json())
    _say(report, options.out, output)
    return PROBLEMS if report.failures else FINE


@attrs.frozen
class Measured:
    """The answers of one run."""

    scored: Scored
    moved: float  #: share of the tokens of its prompts


@attrs.frozen
class Measuring:
    """The engine, in a process that uses a folder."""

    options: argparse.Namespace
    folder: Path
    texts: Sequence[str]

    def runs(self, settings: Sequence[BlendSettings]) -> list[Measured]:
        """Computed, loaded, blended with each of the settings, and with random places. Raises BackendError."""
        options = self.options
        stack = {
            "version": 1,
            "load": "always",
            "load_wait": "10min",
            "status": "off",
            "chunk_tokens": options.chunk_tokens,
            "identity": {"weights": options.weights},
            "tiers": [{"type": "cpu", "capacity": options.memory}],
        }
        prompts = {
            "documents": options.documents,
            "tokens": options.tokens,
            "follow": options.continuation,
            "count": options.count,
        }
        told = self.score(
            {
                "model": options.model,
                "arguments": options.engine,
                "stack": stack,
                "link": options.link,
                "tails": [each.tail for each in settings],
                "texts": self.texts,
                "prompts": prompts,
            }
        )
        runs = [{**told, **run} for run in told["runs"]]
        for run, is_loaded in zip(runs, (False, True), strict=False):
            check_found(run, "memory", all_of_it=is_loaded)
        return [Measured(Scored.of(run), run["moved"] / sum(run["prompt_tokens"])) for run in runs]

    def score(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        """Ask an engine in a process of its own. Raises BackendError."""
        return ask_process("kvtier_blend.quality.scoring", asked, self.folder)


def _chunk_tokens(text: str) -> int | str:
    return text if text == "auto" else int(text)


def _settings(options: argparse.Namespace) -> list[BlendSettings]:
    """Those of each tail, the cheapest first. Raises BackendError."""
    with contextlib.redirect_stdout(sys.stderr):  # where vLLM's log goes
        try:
            from kvtier_blend.settings import BlendSettings
        except ImportError as error:
            raise BackendError(f"cannot import vLLM, which runs the model: {error}") from error
    try:
        tails = sorted({float(tail) for tail in options.tails.split(",")})
        fixed: dict[str, Any] = {"accept_quality": "unmeasured", "link": options.link, "min_tokens": 0}
        return [BlendSettings(tail=tail, **fixed) for tail in tails]
    except ValueError as error:
        raise BackendError(f"cannot use --tails {options.tails} --link {options.link}: {error.args[0]}") from error


def _report(
    options: argparse.Namespace, settings: BlendSettings, blended: Measured, computed: Measured, again: Measured
) -> Report:
    codec = settings.identity(computed.scored.chunk_tokens)
    return Report(
        weights=computed.scored.facts["weights"],
        codec=codec.type,
        codec_digest=codec.digest.hex(),
        figures=computed.scored.differences(blended.scored),
        control=computed.scored.differences(again.scored),
        recall=computed.scored.recall,
        thresholds=thresholds_of(options),
    )


def _told(name: str, run: Measured, figures: Figures, passed: bool | None = None) -> dict[str, Any]:
    found = [run.scored.found_at([depth]) for depth in _depths(run.scored)]
    return {"run": name, "moved": run.moved, **attrs.asdict(figures), "needles": found, "passed": passed}


def _depths(scored: Scored) -> list[float]:
    """Those of the middle of each document that hides a needle."""
    return sorted({depth for depth in scored.depths if depth is not None})


def _say(report: Report, file: Path, output: Output) -> None:
    about = report.about
    output.say(
        f"blending with links of {about['link']} for the weights {report.weights[:16]}…: {about['windows']} windows, "
        f"{about['places']} places, {sum(about['needles'])} needles; {about['documents']} documents of "
        f"{about['document_tokens']} tokens, chunks of {about['chunk_tokens']}",
        "",
    )
    rows = [
        [
            each["run"],
            f"{each['moved']:.1%}",
            *(shown(Estimate(**each[figure]), form) for figure, form in _FORMS.items()),
            f"{sum(each['needles'])}/{sum(about['needles'])}",
            {None: "", True: "passed", False: "failed"}[each["passed"]],
        ]
        for each in about["runs"]
    ]
    heads = "", "moved", "mean KL divergence, nat", "top-1 agreement", "change of perplexity", "needles", ""
    output.say(*table(heads, rows, left=1), "")
    for failure in report.failures:
        output.say(output.paint(f"failed with tail {about['tail']:g}: {failure}", "bad"))
    verdict = "failed" if report.failures else output.paint(f"passed with tail {about['tail']:g}", "good")
    output.say(f"{verdict}: {file}")
