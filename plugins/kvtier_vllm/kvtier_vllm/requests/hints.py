"""Hints for eviction policies: what clients send in vLLM's ``kv_transfer_params``, and orchestrators in ``kv_hints``.

A hint changes no key and no answer, and nothing is loaded, kept or dropped because of one: it only reaches policies.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence

from vllm.v1.request import Request

from kvtier_core.outside import Printable, printable
from kvtier_core.policies.gittins import HINTS
from kvtier_vllm.requests.words import OWN, WORDS, fault

logger = logging.getLogger("kvtier")

#: ``{"kvtier.turn": "tool"}`` is the hint ``turn``.
_PREFIX = "kvtier."
#: In the names of actions, but in none of a client's: otherwise it could speak for the orchestrator.
_VERSION = "@"
#: Clients may send anything. Beyond these limits nothing is passed on to a policy.
_MAX_HINTS = 16
_MAX_CHARACTERS = 256  # of a hint's name and value together
_MAX_ACTION_CHARACTERS = 4096
#: Words of clients that are logged while an engine runs, because kvtier makes nothing of them.
_MAX_LOGGED = 16


class UnreadWords:
    """Logs each word of clients once that is kvtier's, or begins as those do, and that kvtier makes nothing of."""

    def __init__(self) -> None:
        self._logged: set[Printable] = set()

    def look(self, parameters: object, hints: Mapping[str, str]) -> None:
        """Look at a request's ``kv_transfer_params``, of which these hints were made."""
        for word, value in parameters.items() if isinstance(parameters, Mapping) else ():
            if len(self._logged) >= _MAX_LOGGED:
                return
            if isinstance(word, str) and (why := _remark(word, value, hints)):
                self._log(printable(word), why)

    def _log(self, word: Printable, why: str) -> None:
        if word not in self._logged:
            self._logged.add(word)
            logger.info("kvtier: %s in kv_transfer_params: %s; logged once", word, why)


def _remark(word: str, value: object, hints: Mapping[str, str]) -> str:
    """What the log says of a word of kvtier's that it makes nothing of; empty for others."""
    if word in WORDS:
        return fault(word, value)
    if not word.startswith(_PREFIX):
        return ""
    if (hint := word.removeprefix(_PREFIX)) not in hints:
        return "malformed or too long, so ignored"
    if hint in HINTS:
        return ""
    read = ", ".join((*OWN, *(_PREFIX + each for each in HINTS)))
    return f"a hint for other policies than kvtier's own; kvtier reads {read}"


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
        and name not in WORDS
        and _VERSION not in name
        and isinstance(value, str)
        and len(name) + len(value) <= _MAX_CHARACTERS
        and f"{name}{value}".isprintable()
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
            payloads.setdefault(_VERSION.join(map(str, names)), []).append(_json(payload))
    said = {name: f"[{','.join(texts)}]" for name, texts in payloads.items() if all(texts)}
    return {
        name: value
        for name, value in said.items()
        if len(name) + len(value) <= _MAX_ACTION_CHARACTERS and name.isprintable()
    }


def _json(payload: Mapping) -> str:
    """The payload as JSON; empty if that is impossible."""
    try:
        return json.dumps(payload, sort_keys=True, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        return ""
