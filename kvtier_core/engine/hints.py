"""What a client says of a request, for eviction policies: words in `kv_transfer_params`, which vLLM's API takes."""

from __future__ import annotations

from collections.abc import Mapping

from vllm.v1.request import Request

#: ``{"kvtier.turn": "tool"}`` is the hint ``turn``.
_PREFIX = "kvtier."
#: A client says what it likes; a policy is told so many hints at most, and of each so many characters.
_MOST, _LONGEST = 16, 256


def hints_of(request: Request) -> Mapping[str, str]:
    """Whatever else stands there is not meant for us, or not meant well, and is passed over."""
    said = request.kv_transfer_params
    if not isinstance(said, Mapping):
        return {}
    hints = {
        name.removeprefix(_PREFIX): word
        for name, word in said.items()
        if isinstance(name, str)
        and name.startswith(_PREFIX)
        and isinstance(word, str)
        and len(name) + len(word) <= _LONGEST
    }
    return hints if len(hints) <= _MOST else {}
