"""The report of `kvtier quality`, which a store tier with a lossy codec names.

Its checksum tells damage and careless edits. It is no signature: whoever may write the file can write any figures.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

from kvtier_core.errors import KvtierError
from kvtier_core.frames.identity import CodecIdentity
from kvtier_core.quality.statistics import Estimate, Figures

_FORMAT = 1
#: Between which a figure lies, whatever is measured.
_RANGES = {"kl": (0.0, math.inf), "top1": (0.0, 1.0), "perplexity": (-1.0, math.inf), "lost": (-1.0, 1.0)}


class ReportRefused(KvtierError):
    """A report does not count; the message says why."""


@attrs.frozen
class Thresholds:
    """What the pessimistic end of each interval must keep. docs/quality.md says why these are the defaults."""

    kl: float = 0.05  #: nat a token, at most
    top1: float = 0.95  #: at least
    perplexity: float = 0.02  #: relative change, at most
    lost: float = 0.05  #: needles as a share of all, at most; the figure itself, whose interval is wide
    recall: float = 0.5  #: share of the needles that the model finds when it computes everything, at least


@attrs.frozen
class Report:
    """How far answers differ behind a codec, for one model."""

    weights: str  #: the fact ``weights`` of the engine's namespace
    codec: str  #: the name of the codec
    codec_digest: str  #: of its type and options, in hex
    figures: Figures
    control: Figures  #: of a run whose prefixes came back without a codec
    recall: float  #: share of the needles that the model finds when it computes everything
    thresholds: Thresholds = attrs.field(factory=Thresholds)
    about: Mapping[str, Any] = attrs.field(factory=dict)  #: what was measured, with which versions; for people

    @property
    def failures(self) -> list[str]:
        """The thresholds that the figures do not keep; empty if the codec passes."""
        figures, limits = self.figures, self.thresholds
        too_much = [
            ("the mean KL divergence may be", figures.kl.high, limits.kl),
            ("the perplexity may rise by", figures.perplexity.high, limits.perplexity),
            ("needles are lost:", figures.lost.value, limits.lost),
        ]
        too_little = [
            ("the top-1 agreement may be", figures.top1.low, limits.top1),
            ("the model itself finds of the needles only", self.recall, limits.recall),
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

        ``weights`` is a fact of its namespace; None: it is not known yet.
        """
        if (self.codec, self.codec_digest) != (codec.type, codec.digest.hex()):
            raise ReportRefused(f"it is of {self.codec} {self.codec_digest[:8]}, and the codec is {codec}")
        if weights is not None and self.weights != weights:
            raise ReportRefused(f"it is of the weights {self.weights!r}, and the engine's are {weights!r}")
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
                raise ReportRefused("another version of kvtier wrote it")
            del content["passed"]  # it follows from the figures
            numbers = {name: _figures(content.pop(name)) for name in ("figures", "control")}
            thresholds = Thresholds(**{name: _number(each) for name, each in content.pop("thresholds").items()})
            for name in ("weights", "codec", "codec_digest"):
                if not isinstance(content[name], str):
                    raise ValueError(f"{name} is no text")
            if not 0 <= _number(content["recall"]) <= 1:
                raise ValueError("recall is no share")
            report = cls(**content, **numbers, thresholds=thresholds)
            if told != json.loads(report.to_json())["checksum"]:
                raise ReportRefused("it is damaged, or was edited: its checksum is another one")
        except OSError as error:
            raise ReportRefused(f"it cannot be read: {error.strerror}") from error
        except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
            raise ReportRefused(f"it is no report of kvtier quality: {error!r}") from error
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
            raise ValueError(f"{name} cannot be {each.low:g}, {each.value:g}, {each.high:g}")
    return Figures(**estimates)


def _number(value: float) -> float:
    if isinstance(value, bool) or not math.isfinite(value):
        raise ValueError(f"{value!r} is no figure")
    return float(value)
