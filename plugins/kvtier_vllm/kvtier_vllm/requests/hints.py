"""Hints for eviction policies: what clients send in vLLM's ``kv_transfer_params``, and orchestrators in ``kv_hints``.

A hint changes no key and no answer, and nothing is loaded, kept or dropped because of one: it only reaches policies.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from vllm.v1.request import Request

#: ``{"kvtier.turn": "tool"}`` is the hint ``turn``.
_PREFIX = "kvtier."
#: In the names of actions, but in none of a client's: otherwise it could speak for the orchestrator.
_VERSION = "@"
#: Clients may send anything. Beyond these limits nothing is passed on to a policy.
_MAX_HINTS = 16
_MAX_CHARACTERS = 256  # of a hint's name and value together
_MAX_ACTION_CHARACTERS = 4096


def hints_of(request: Request) -> Mapping[str, str]:
    """The hints of a request, by name. What is not well-formed is ignored.

    An action of ``kv_hints`` is the hint ``TYPE@VERSION``, and its value a JSON array of the payloads of all actions of
    that type and version. vLLM defines the envelope but no action, so their payloads are not inspected.
    """
    return {**_client_hints(request.kv_transfer_params), **_orchestrator_hints(getattr(request, "kv_hints", None))}


def _client_hints(parameters: object) -> Mapping[str, str]:
    if not isinstance(parameters, Mapping):
        return {}
    hints = {
        name.removeprefix(_PREFIX): value
        for name, value in parameters.items()
        if isinstance(name, str)
        and name.startswith(_PREFIX)
        and _VERSION not in name
        and isinstance(value, str)
        and len(name) + len(value) <= _MAX_CHARACTERS
    }
    return hints if len(hints) <= _MAX_HINTS else {}


def _orchestrator_hints(envelope: object) -> Mapping[str, str]:
    actions = getattr(envelope, "actions", None)
    if not isinstance(actions, Sequence) or len(actions) > _MAX_HINTS:
        return {}
    payloads: dict[str, list[str]] = {}
    for action in actions:
        names = getattr(action, "action_type", None), getattr(action, "action_version", None)
        payload = getattr(action, "payload", None)
        if all(isinstance(name, str) for name in names) and isinstance(payload, Mapping):
            payloads.setdefault(_VERSION.join(names), []).append(_json(payload))
    said = {name: f"[{','.join(texts)}]" for name, texts in payloads.items() if all(texts)}
    return {name: value for name, value in said.items() if len(name) + len(value) <= _MAX_ACTION_CHARACTERS}


def _json(payload: Mapping) -> str:
    """The payload as JSON; empty if that is impossible."""
    try:
        return json.dumps(payload, sort_keys=True, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        return ""
