"""The settings of blending, and how a request opts in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import attrs
from vllm.v1.request import Request

from kvtier_core.config import decode, yaml_nodes
from kvtier_core.config.model import Config
from kvtier_core.config.scalars import Unavailable
from kvtier_core.config.yaml_nodes import ProblemCollector
from kvtier_vllm.requests.identity import Identifier

#: The settings in vLLM's ``kv_connector_extra_config``.
SETTINGS = "kvtier.blend"
#: In ``kv_transfer_params``: this request may be blended.
_WORD = "kvtier_blend"
#: Begins the ``cache_salt`` of a request that may be blended. The rest is the salt whose KV it may be given.
#: vLLM keeps blocks with another salt apart in its own prefix cache, so no other request meets blended KV there.
SALT = "kvtier-blend:"


def _check_tail(settings: BlendSettings, field: attrs.Attribute, tail: float) -> None:
    if not 0 <= tail < 1:
        raise ValueError(f"expected a share of the prompt from 0 to below 1, got {tail}")


def _check_count(settings: BlendSettings, field: attrs.Attribute, count: int) -> None:
    if count < 0:
        raise ValueError(f"expected 0 or more tokens, got {count}")


@attrs.frozen
class BlendSettings:
    """What is computed of a blended prompt, and when it is worth it."""

    #: ``unmeasured``: the operator accepts answers whose quality nobody has measured for this model.
    accept_quality: Literal["unmeasured"]
    tail: float = attrs.field(default=0.25, validator=_check_tail)  #: share of the prompt, at its end, that is computed
    link: int = attrs.field(default=4, validator=_check_count)  #: first tokens of each moved run that are computed
    min_tokens: int = attrs.field(default=512, validator=_check_count)  #: that must move, else the prompt is computed


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
    return isinstance(said, Mapping) and said.get(_WORD) is True


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
