"""The report of `kvtier quality`, which a store tier with a lossy codec names.

Its checksum detects damage and careless edits. It is not a signature: whoever writes the file can write any figures.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

from kvtier_core.config.guard import PluginCall
from kvtier_core.config.model import ArenaTierConfig, StackConfig
from kvtier_core.errors import ConfigError, KvtierError
from kvtier_core.frames.identity import CodecIdentity, identity_of

_FORMAT = 1
#: The limits of each figure, whatever is measured.
_RANGES = {"kl": (0.0, math.inf), "top1": (0.0, 1.0), "perplexity": (-1.0, math.inf), "lost": (-1.0, 1.0)}


class ReportRefused(KvtierError):
    """A report is not accepted; the message states the reason."""


@attrs.frozen
class Estimate:
    """A figure, and the interval that covers it in 95 of 100 such measurements."""

    value: float
    low: float
    high: float


@attrs.frozen
class Figures:
    """The differences of a run from the one that computed everything."""

    kl: Estimate  #: mean Kullback-Leibler divergence from it, in nats per token
    top1: Estimate  #: share of places with the same likeliest token
    perplexity: Estimate  #: relative change of the perplexity of the continuations
    lost: Estimate  #: needles that it no longer finds, less those that only it finds, as a share of all


@attrs.frozen
class Thresholds:
    """Limits for the pessimistic end of each interval. docs/quality.md explains the defaults."""

    kl: float = 0.05  #: nats per token, at most
    top1: float = 0.95  #: at least
    perplexity: float = 0.02  #: relative change, at most
    lost: float = 0.05  #: needles as a share of all, at most; the figure itself, whose interval is wide
    recall: float = 0.5  #: share of the needles that the model finds when it computes everything, at least


@attrs.frozen
class Report:
    """How far answers differ with a codec, for one model."""

    weights: str  #: the fact ``weights`` of the engine's namespace
    codec: str  #: the name of the codec
    codec_digest: str  #: of its type and options, in hex
    figures: Figures
    control: Figures  #: of a run whose prefixes were loaded without a codec
    recall: float  #: share of the needles that the model finds when it computes everything
    thresholds: Thresholds = attrs.field(factory=Thresholds)
    about: Mapping[str, Any] = attrs.field(factory=dict)  #: what was measured, with which versions; for people

    @property
    def failures(self) -> list[str]:
        """The thresholds that the figures violate; empty if the codec passes."""
        figures, limits = self.figures, self.thresholds
        too_much = [
            ("the mean KL divergence may be as high as", figures.kl.high, limits.kl),
            ("the perplexity may rise by as much as", figures.perplexity.high, limits.perplexity),
            ("needles are lost:", figures.lost.value, limits.lost),
        ]
        too_little = [
            ("the top-1 agreement may be as low as", figures.top1.low, limits.top1),
            ("the share of needles that the model itself finds is", self.recall, limits.recall),
        ]
        return [f"{what} {value:.4g}, more than {limit:g}" for what, value, limit in too_much if not value <= limit] + [
            f"{what} {value:.4g}, less than {limit:g}" for what, value, limit in too_little if not value >= limit
        ]

    def __str__(self) -> str:
        kl, top1, perplexity = self.figures.kl, self.figures.top1, self.figures.perplexity
        return (
            f"mean KL divergence {kl.value:.4g} nat a token, top-1 agreement {top1.value:.1%}, "
            f"perplexity {perplexity.value:+.2%}, needles lost {self.figures.lost.value:.1%}"
        )

    def check(self, weights: str | None, codec: CodecIdentity) -> None:
        """Raise ReportRefused unless an engine with these weights may use this codec.

        ``weights`` is a fact of its namespace; None if it is not known yet.
        """
        if (self.codec, self.codec_digest) != (codec.type, codec.digest.hex()):
            raise ReportRefused(f"it is for {self.codec} {self.codec_digest[:8]}, but the codec is {codec}")
        if weights is not None and self.weights != weights:
            raise ReportRefused(f"it is for the weights {self.weights!r}, but the engine has {weights!r}")
        if self.failures:
            raise ReportRefused(f"the codec did not pass: {'; '.join(self.failures)}")

    def to_json(self) -> str:
        """The text of the file."""
        content = {"kvtier_quality": _FORMAT, **attrs.asdict(self), "passed": not self.failures}
        return json.dumps({**content, "checksum": _checksum(content)}, indent=1) + "\n"

    @classmethod
    def read(cls, file: Path) -> Report:
        """The report in a file. Raises ReportRefused."""
        try:
            content = json.loads(file.read_bytes())
            told = content.pop("checksum")
            if content.pop("kvtier_quality") != _FORMAT:
                raise ReportRefused("written by another version of kvtier")
            del content["passed"]  # it follows from the figures
            figures, control = (_figures(content.pop(name)) for name in ("figures", "control"))
            thresholds = Thresholds(**{name: _number(each) for name, each in content.pop("thresholds").items()})
            for name in ("weights", "codec", "codec_digest"):
                if not isinstance(content[name], str):
                    raise ValueError(f"{name} is not a string")
            if not 0 <= _number(content["recall"]) <= 1:
                raise ValueError("recall is not between 0 and 1")
            report = cls(**content, figures=figures, control=control, thresholds=thresholds)
            if told != json.loads(report.to_json())["checksum"]:
                raise ReportRefused("damaged or edited: its checksum does not match")
        except OSError as error:
            raise ReportRefused(f"cannot be read: {error.strerror}") from error
        except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
            raise ReportRefused(f"not a report of kvtier quality: {error!r}") from error
        return report


def _checksum(content: Mapping[str, Any]) -> str:
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _figures(content: Mapping[str, Mapping[str, float]]) -> Figures:
    estimates = {}
    for name, told in content.items():
        least, most = _RANGES[name]
        each = estimates[name] = Estimate(*(_number(told[end]) for end in ("value", "low", "high")))
        if not least <= each.low <= each.value <= each.high <= most:
            raise ValueError(f"invalid {name}: {each.low:g}, {each.value:g}, {each.high:g}")
    return Figures(**estimates)


def _number(value: float) -> float:
    if isinstance(value, bool) or not math.isfinite(value):
        raise ValueError(f"{value!r} is not a finite number")
    return float(value)


def check_quality(config: StackConfig, number: int, weights: str | None = None) -> str:
    """How far answers may differ with a tier's codec; empty if it is lossless.

    ``weights`` is the fact of the engine's namespace, None if there is no engine yet. Raises ConfigError unless
    the codec was measured for them, with these options, and passed.
    """
    tier = config.tiers[number]
    if isinstance(tier, ArenaTierConfig) or getattr(tier.serializer, "lossless", None) is not False:
        return ""
    path, chosen = config.path_of(number), tier.serializer
    call = PluginCall(config.plugin_of(chosen), "the serializer", f"{path}.serializer", config.problem)
    codec = call.ask(lambda: identity_of(chosen))
    if tier.accept_quality:
        return f"{tier.name}: answers may differ: {codec}; not measured (accept_quality: unmeasured)"
    options = [f"{field.alias}: {getattr(chosen, field.name)}" for field in attrs.fields(type(chosen)) if field.init]
    named = f"'{{{', '.join([f'type: {chosen.type}', *options])}}}'"
    hint = f"run kvtier quality --model FOLDER --codec {named} --out FILE, and write quality: FILE"
    if tier.quality is None:
        why = f"{codec}: answers may differ, and no report says how much"
        raise ConfigError([config.problem(f"{path}.serializer", why, f"{hint}, or accept_quality: unmeasured")])
    try:
        report = Report.read(tier.quality)
        report.check(weights, codec)
    except ReportRefused as error:
        why = f"{tier.quality} is not accepted: {error}"
        raise ConfigError([config.problem(f"{path}.quality", why, hint)]) from error
    return f"{tier.name}: answers may differ: {codec}; {report} ({tier.quality})"
