"""Hints that a client gives in vLLM's ``kv_transfer_params``, for eviction policies."""

from __future__ import annotations

from collections.abc import Mapping

from vllm.v1.request import Request

#: ``{"kvtier.turn": "tool"}`` is the hint ``turn``.
_PREFIX = "kvtier."
#: Clients may send anything. Beyond these limits nothing is passed on to a policy.
_MAX_HINTS = 16
_MAX_CHARACTERS = 256  # of a hint's name and value together


def hints_of(request: Request) -> Mapping[str, str]:
    """The hints of a request, by name. Parameters that are not well-formed hints are ignored."""
    parameters = request.kv_transfer_params
    if not isinstance(parameters, Mapping):
        return {}
    hints = {
        name.removeprefix(_PREFIX): value
        for name, value in parameters.items()
        if isinstance(name, str)
        and name.startswith(_PREFIX)
        and isinstance(value, str)
        and len(name) + len(value) <= _MAX_CHARACTERS
    }
    return hints if len(hints) <= _MAX_HINTS else {}
