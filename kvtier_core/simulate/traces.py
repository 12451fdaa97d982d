"""Traces of prompts: one JSON object a line, in the format of Mooncake's public traces, or as kvtier records it.

    {"timestamp": 27482, "input_length": 1301, "output_length": 52, "hash_ids": [46, 47, 2353]}

``timestamp`` is in milliseconds, lengths are in tokens, and each id stands for a chunk of the prompt. kvtier's own
recordings also name the ``chunk_tokens`` and the ``finish_reason``.
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Iterator
from functools import cached_property
from typing import Any

import attrs

from kvtier_core.errors import ConfigError, Problem
from kvtier_core.types import KEY_NBYTES, ChunkKey

#: Tokens of a chunk where the trace does not say: those of Mooncake's traces.
CHUNK_TOKENS = 512


@attrs.frozen
class Prompt:
    """One request."""

    at: float  #: seconds since the trace began
    tokens: int
    path: tuple[ChunkKey, ...]


@attrs.frozen
class Trace:
    """Prompts, and how many tokens a chunk has."""

    name: str
    chunk_tokens: int
    prompts: tuple[Prompt, ...]  #: in order of time

    @cached_property
    def accesses(self) -> int:
        """How many chunks all prompts have together."""
        return sum(len(prompt.path) for prompt in self.prompts)

    @cached_property
    def distinct(self) -> int:
        """How many distinct chunks there are."""
        return len({key for prompt in self.prompts for key in prompt.path})

    @cached_property
    def tokens(self) -> int:
        """How many tokens all prompts have together."""
        return sum(prompt.tokens for prompt in self.prompts)

    def tokens_in(self, prompt: Prompt, chunks: int) -> int:
        """How many tokens are in the first ``chunks`` of a prompt; its last chunk may be a part of one."""
        return min(chunks * self.chunk_tokens, prompt.tokens)

    def in_chunks_of(self, tokens: int) -> Trace:
        """The same prompts in chunks of ``tokens``, if that is a multiple of its own; otherwise the trace itself."""
        times, rest = divmod(tokens, self.chunk_tokens)
        if rest or times < 2:
            return self
        # A key stands for the whole prefix, so the last of several stands for all of them.
        prompts = tuple(attrs.evolve(prompt, path=prompt.path[times - 1 :: times]) for prompt in self.prompts)
        return Trace(self.name, tokens, prompts)


def read_trace(path: pathlib.Path | str, chunk_tokens: int | None = None) -> Trace:
    """Read a file. ``chunk_tokens`` is for traces that do not say how long a chunk is.

    Raises ConfigError, which names the line.
    """
    path = pathlib.Path(path)
    usual = CHUNK_TOKENS if chunk_tokens is None else chunk_tokens
    names = _Names()
    prompts: list[Prompt] = []
    for line in _lines(path):
        said = line.count("chunk_tokens", default=usual, least=1)
        if chunk_tokens not in (None, said):
            raise line.wrong("chunk_tokens", f"{said}, and {chunk_tokens} before it; a trace has one size of chunks")
        chunk_tokens = said
        prompts.append(_prompt(line, said, names))
    if not prompts:
        raise ConfigError([Problem(str(path), "$", "it contains no prompt")])
    prompts.sort(key=lambda prompt: prompt.at)  # a recording has them in the order in which they ended
    begin = prompts[0].at
    return Trace(path.stem, chunk_tokens, tuple(attrs.evolve(each, at=each.at - begin) for each in prompts))


class _Names:
    """Makes a key of an id and all ids before it, so that ids that depend on the content alone work too."""

    def __init__(self) -> None:
        self._keys: dict[tuple[ChunkKey | None, int], ChunkKey] = {}

    def path(self, ids: list[int]) -> tuple[ChunkKey, ...]:
        path: list[ChunkKey] = []
        parent = None
        for each in ids:
            fresh = ChunkKey(len(self._keys).to_bytes(KEY_NBYTES))
            parent = self._keys.setdefault((parent, each), fresh)
            path.append(parent)
        return tuple(path)


@attrs.frozen
class _Line:
    where: str
    fields: dict[str, Any]

    def wrong(self, field: str, why: str, hint: str = "") -> ConfigError:
        return ConfigError([Problem(self.where, f"$.{field}", why, hint)])

    def value(self, field: str) -> Any:
        if field not in self.fields:
            raise ConfigError([Problem(self.where, "$", f"'{field}' is missing")])
        return self.fields[field]

    def count(self, field: str, *, default: int | None = None, least: int = 0) -> int:
        value = self.value(field) if default is None else self.fields.get(field, default)
        if type(value) is not int or value < least:
            raise self.wrong(field, f"expected a whole number from {least} on, found {_shown(value)}")
        return value


def _lines(path: pathlib.Path) -> Iterator[_Line]:
    try:
        with path.open(encoding="utf-8") as file:
            for number, text in enumerate(file, start=1):
                where = f"{path}:{number}"
                if text.strip() and not _torn(text):
                    yield _Line(where, _parsed(text, where))
    except OSError as error:
        raise ConfigError([Problem(str(path), "$", f"cannot be read: {error.strerror}")]) from error
    except UnicodeDecodeError as error:
        raise ConfigError([Problem(str(path), "$", f"cannot be read: {error}")]) from error


def _torn(text: str) -> bool:
    """Is this the last line of a recording whose engine was killed?"""
    return not text.endswith(("}", "\n"))


def _parsed(text: str, where: str) -> dict[str, Any]:
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError([Problem(where, "$", f"not JSON: {error}", "each line is a request")]) from error
    if not isinstance(fields, dict):
        raise ConfigError([Problem(where, "$", f"expected an object, found {_shown(fields)}")])
    return fields


def _prompt(line: _Line, chunk_tokens: int, names: _Names) -> Prompt:
    at = line.value("timestamp")
    if type(at) not in (int, float) or not 0 <= at < 1e18:
        raise line.wrong("timestamp", f"expected milliseconds, found {_shown(at)}")
    tokens = line.count("input_length", least=1)
    ids = line.value("hash_ids")
    if not isinstance(ids, list) or not all(type(each) is int for each in ids):
        raise line.wrong("hash_ids", f"expected a list of whole numbers, found {_shown(ids)}")
    if ids and len(ids) not in (tokens // chunk_tokens, -(-tokens // chunk_tokens)):
        why = f"{len(ids)} ids, and {tokens} tokens are {tokens / chunk_tokens:.1f} chunks of {chunk_tokens}"
        raise line.wrong("hash_ids", why, "give the number of tokens in a chunk: --chunk-tokens")
    return Prompt(at / 1000, tokens, names.path(ids))


def _shown(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
