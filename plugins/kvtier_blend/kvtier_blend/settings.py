"""The settings of blending, and how a request opts in."""

from __future__ import annotations

import hashlib
import json
import pathlib
from collections.abc import Mapping
from typing import Any, Literal

import attrs
from vllm.v1.request import Request

from kvtier_core.config import decode, yaml_nodes
from kvtier_core.config.model import Config
from kvtier_core.config.quality import Report, ReportRefused
from kvtier_core.config.scalars import Unavailable
from kvtier_core.config.yaml_nodes import ProblemCollector
from kvtier_core.frames.identity import DIGEST_NBYTES, CodecIdentity
from kvtier_vllm.requests.identity import Identifier

#: The settings in vLLM's ``kv_connector_extra_config``.
SETTINGS = "kvtier.blend"
#: In ``kv_transfer_params``: this request may be blended.
WORD = "kvtier_blend"
#: Begins the ``cache_salt`` of a request that may be blended. The rest is the salt whose KV it may be given.
#: vLLM keeps blocks with another salt apart in its own prefix cache, so no other request meets blended KV there.
SALT = "kvtier-blend:"


def _check_tail(settings: BlendSettings, field: attrs.Attribute, tail: float) -> None:
    if not 0 <= tail < 1:
        raise ValueError(f"expected a share of the prompt from 0 to below 1, got {tail}")


def _check_count(settings: BlendSettings, field: attrs.Attribute, count: int) -> None:
    if count < 0:
        raise ValueError(f"expected 0 or more tokens, got {count}")


def _instead_of_a_report(settings: BlendSettings, field: attrs.Attribute, accepted: str | None) -> None:
    if accepted and settings.quality is not None:
        raise ValueError("'accept_quality' and 'quality' exclude each other")
    if not accepted and settings.quality is None:
        raise ValueError("needs 'quality', a report of kvtier blend-quality, or 'accept_quality: unmeasured'")


@attrs.frozen
class BlendSettings:
    """What is computed of a blended prompt, and when it is worth it."""

    #: The file with the report of `kvtier blend-quality` for this model, these settings and the engine's chunks.
    quality: pathlib.Path | None = None
    #: ``unmeasured``: the operator accepts answers whose quality nobody has measured for this model.
    accept_quality: Literal["unmeasured"] | None = attrs.field(default=None, validator=_instead_of_a_report)
    tail: float = attrs.field(default=0.25, validator=_check_tail)  #: share of the prompt, at its end, that is computed
    link: int = attrs.field(default=4, validator=_check_count)  #: first tokens of each moved run that are computed
    min_tokens: int = attrs.field(default=512, validator=_check_count)  #: that must move, else the prompt is computed

    def identity(self, chunk_tokens: int) -> CodecIdentity:
        """Identifies all that decides how far answers differ, for a model; as a codec, for its report."""
        described = json.dumps([float(self.tail), self.link, chunk_tokens])
        told = hashlib.blake2b(described.encode(), digest_size=DIGEST_NBYTES, person=b"kvtier-blend")
        return CodecIdentity("blend", told.digest(), lossless=False)

    def check(self, weights: str, chunk_tokens: int) -> str:
        """How far answers differ, for people. ``weights`` is the fact of the engine's namespace.

        Raises ReportRefused unless that was measured for them, and passed, or if the operator does not mind.
        """
        if self.quality is None:
            return "not measured (accept_quality: unmeasured)"
        try:
            report = Report.read(self.quality)
            report.check(weights, self.identity(chunk_tokens))
        except ReportRefused as error:
            command = f"kvtier blend-quality --model FOLDER --tails {self.tail:g} --link {self.link}"
            hint = f"run {command} --chunk-tokens {chunk_tokens} --out FILE"
            raise ReportRefused(f"{self.quality} is not accepted: {error}; {hint}") from error
        return f"{report} ({self.quality})"


def read_settings(extra: Mapping[str, Any]) -> BlendSettings:
    """The settings of ``kv_connector_extra_config``. Raises ConfigError with every problem found."""
    collector = ProblemCollector()
    root = yaml_nodes.from_plain(extra.get(SETTINGS, {}), "kv_connector_extra_config", collector, f"$.{SETTINGS}")
    values = decode.read_keys(root, decode.settings(BlendSettings), _no_plugins, collector)
    decode.validate(BlendSettings, root, values, collector)
    collector.raise_if_any()
    return decode.construct(BlendSettings, root, values)


def asks(request: Request) -> bool:
    """Does the request say that it may be blended?"""
    said = request.kv_transfer_params
    return isinstance(said, Mapping) and said.get(WORD) is True


def is_apart(request: Request) -> bool:
    """Does vLLM keep the blocks of the request apart from those of requests that are not blended?"""
    return (request.cache_salt or "").startswith(SALT)


class BlendIdentifier(Identifier):
    """Names the exact KV of a request by the salt that it would have if it were not blended."""

    def salt(self, request: Request) -> str:
        """The rest of its salt."""
        return super().salt(request).removeprefix(SALT)


def _no_plugins(family: type[Config], name: str) -> Unavailable:
    return Unavailable(f"no setting of blending takes a {family.__name__}")
