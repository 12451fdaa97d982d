"""The prompts of `kvtier blend-quality`: documents that an earlier prompt has in another order."""

from __future__ import annotations

import random
from collections.abc import Sequence

import attrs

from kvtier_core.errors import BackendError
from kvtier_vllm.quality.prompts import Encode, Prompt, draw_needle

_SYSTEM = "You are a helpful assistant. Answer from the documents below."
_HEAD = "\n\n### Document\n"


@attrs.frozen
class DocumentsPrompt(Prompt):
    """A prompt of several documents. Its ``depth`` is that of the middle of the document with the needle."""

    earlier: Sequence[int] = attrs.field(kw_only=True)  #: the prompt that has the documents in another order


@attrs.frozen
class _Window:
    """A part of a text."""

    text: int  #: its number
    at: int  #: of the first token
    tokens: Sequence[int]

    def meets(self, text: int, begin: int, end: int) -> bool:
        """Does it have any of these tokens?"""
        return self.text == text and self.at < end and begin < self.at + len(self.tokens)


def prompts_of(
    texts: Sequence[str], encode: Encode, begin: Sequence[int], *, documents: int, tokens: int, follow: int, count: int
) -> list[DocumentsPrompt]:
    """``count`` prompts of these texts: the last document of one half goes on, the others hide a needle in one.

    Parameters
    ----------
    texts
        The documents are windows of them, and none overlap. Texts with fewer than ``tokens + follow`` tokens are
        skipped.
    encode
        Turns text into tokens, and adds none.
    begin
        The tokens with which the model wants every prompt to begin.
    documents
        Number of documents of each prompt, at least 2.
    tokens
        Number of tokens of each document.
    follow
        Number of tokens of the continuation of a window.

    Raises BackendError if the texts are too short.
    """
    head, system = encode(_HEAD), [*begin, *encode(_SYSTEM)]
    length = tokens - len(head)
    encoded = [found for found in map(encode, texts) if len(found) >= length + follow]
    pool = [
        _Window(number, at, text[at : at + length])
        for number, text in enumerate(encoded)
        for at in range(0, len(text) - length + 1, length)
    ]
    drawn = random.Random(0)
    if tokens <= len(head) + len(draw_needle(drawn, encode)[0]):
        raise BackendError(f"a document of {tokens} tokens has no room for a needle; increase --tokens")
    prompts = []
    for number in range((count + 1) // 2):
        text, end = _end(encoded, number, (count + 1) // 2, length, follow)
        others = [each for each in pool if not each.meets(text, end - length, end + follow)]
        chosen = [*_choose(drawn, others, documents - 1), encoded[text][end - length : end]]
        told = [[*head, *each] for each in chosen]
        prompts.append(_prompt(drawn, system, told, [], encoded[text][end : end + follow]))
    for number in range(count // 2):
        needle, question, answer = draw_needle(drawn, encode)
        told = [[*head, *each] for each in _choose(drawn, pool, documents)]
        place = number % documents
        hay = told[place][: tokens - len(needle)]
        at = drawn.randrange(len(head), len(hay))
        told[place] = [*hay[:at], *needle, *hay[at:]]
        prompts.append(_prompt(drawn, system, told, question, answer, (place + 0.5) / documents))
    return prompts


def _end(texts: Sequence[Sequence[int]], number: int, count: int, length: int, follow: int) -> tuple[int, int]:
    """The text of a window, and where it ends: spread over the texts so that no token is in two continuations."""
    if not texts:
        raise BackendError(f"no text has {length + follow} tokens; choose smaller --tokens, or add longer texts")
    which, place = number % len(texts), number // len(texts)
    many = -(-(count - which) // len(texts))
    last = len(texts[which]) - length - follow
    if many > last // follow + 1:
        raise BackendError(f"a text has room for {last // follow + 1} windows, not {many}; add texts, or longer ones")
    return which, last * place // max(1, many - 1) + length


def _choose(drawn: random.Random, pool: Sequence[_Window], count: int) -> list[Sequence[int]]:
    if len(pool) < count:
        raise BackendError(f"the texts have {len(pool)} other documents, fewer than {count}; add texts, or longer ones")
    return [each.tokens for each in drawn.sample(pool, count)]


def _prompt(
    drawn: random.Random,
    system: Sequence[int],
    documents: Sequence[Sequence[int]],
    end: Sequence[int],
    continuation: Sequence[int],
    depth: float | None = None,
) -> DocumentsPrompt:
    """The first document is another one in the earlier prompt, so the two have no prefix but ``system``."""
    order = drawn.sample(range(len(documents)), len(documents))
    if order[0] == 0:
        order.append(order.pop(0))
    flat = [[token for document in each for token in document] for each in (documents, [documents[i] for i in order])]
    return DocumentsPrompt([*system, *flat[0], *end], continuation, depth, earlier=[*system, *flat[1]])
