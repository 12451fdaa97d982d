"""The prompts of `kvtier quality`: windows of texts with the tokens that follow, and needles hidden in the texts.

A needle is a sentence with a number that cannot be guessed; the prompt ends where only that number can follow (Kamradt,
2023, "Needle in a haystack").
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable, Iterator, Sequence
from importlib import resources
from pathlib import Path

import attrs

from kvtier_core.errors import BackendError

#: The most windows of a text. Those of one text are not independent, so a text counts no more for being long.
_WINDOWS = 6
#: Number of needles, over all texts. If half of them are found, the 95 % interval of that share is 36 points wide.
_NEEDLES = 30
#: Places of a needle in the haystack, as shares of the prompt.
DEPTHS = (0.1, 0.3, 0.5, 0.7, 0.9)
_CITIES = ("Lisbon", "Oslo", "Cairo", "Lima", "Kyoto", "Riga")

Encode = Callable[[str], Sequence[int]]


@attrs.frozen
class Prompt:
    """A prompt of which whole chunks come back from a tier, and the tokens that follow it."""

    tokens: Sequence[int]
    continuation: Sequence[int]
    depth: float | None = None  #: of its needle; None: it is a window of a text


def our_texts() -> list[str]:
    """Prose, documentation and code."""
    folder = resources.files(__package__) / "texts"
    return [(folder / f"{name}.txt").read_text("utf-8") for name in ("prose", "documentation", "code")]


def read_texts(file: Path) -> list[str]:
    """The texts of a JSONL file, each a line with the key ``text``; any other file is one text. Raises BackendError."""
    try:
        whole = file.read_text("utf-8")
        return [str(json.loads(line)["text"]) for line in whole.splitlines()] if file.suffix == ".jsonl" else [whole]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BackendError(
            f'cannot read prompts from {file}: {error!r}; each line of a JSONL file is {{"text": …}}'
        ) from error


def prompts_of(texts: Sequence[str], encode: Encode, begin: Sequence[int], tokens: int, follow: int) -> list[Prompt]:
    """The prompts made of these texts.

    Parameters
    ----------
    texts
        Those with fewer than ``tokens + follow`` tokens are skipped.
    encode
        Turns text into tokens, and adds none.
    begin
        The tokens with which the model wants every prompt to begin.
    tokens
        Number of tokens of each prompt.
    follow
        Number of tokens of the continuation of a window.

    Raises BackendError if every text is too short.
    """
    encoded = [found for found in map(encode, texts) if len(found) >= tokens + follow]
    if not encoded:
        raise BackendError(f"no text has {tokens + follow} tokens; choose a smaller --tokens, or add longer texts")
    room = tokens - len(begin)
    windows = [window for text in encoded for window in _windows(text, begin, room, follow)]
    return windows + list(itertools.islice(_needles(encoded, encode, begin, room), _NEEDLES))


def _windows(text: Sequence[int], begin: Sequence[int], room: int, follow: int) -> Iterator[Prompt]:
    """Windows spread over a text, so far apart that no token is in two continuations."""
    last = len(text) - room - follow
    count = min(_WINDOWS, last // follow + 1)
    for number in range(count):
        end = last * number // max(1, count - 1) + room
        yield Prompt([*begin, *text[end - room : end]], text[end : end + follow])


def _needles(texts: Sequence[Sequence[int]], encode: Encode, begin: Sequence[int], room: int) -> Iterator[Prompt]:
    drawn = random.Random(0)
    for round_ in itertools.count():
        for text in texts:
            depth = DEPTHS[round_ % len(DEPTHS)]
            needle, question, answer = draw_needle(drawn, encode)
            hay = text[: room - len(needle) - len(question)]
            at = int(depth * len(hay))
            yield Prompt([*begin, *hay[:at], *needle, *hay[at:], *question], answer, depth)


def draw_needle(drawn: random.Random, encode: Encode) -> tuple[Sequence[int], Sequence[int], Sequence[int]]:
    """The tokens of a sentence with a number, of the beginning of a question for it, and of the answer."""
    city, number = drawn.choice(_CITIES), drawn.randrange(10_000, 100_000)
    question = encode(f"\n\nThe secret number of {city} is")
    answer = encode(f"\n\nThe secret number of {city} is {number}")[len(question) :]
    return encode(f"\n\nThe secret number of {city} is {number}. Remember it.\n\n"), question, answer
