"""Traces of prompts: one JSON object per line, in the format of Mooncake's public traces, or as kvtier records it.

    {"timestamp": 27482, "input_length": 1301, "output_length": 52, "hash_ids": [46, 47, 2353]}

``timestamp`` is in milliseconds, lengths are in tokens, and each id stands for a chunk of the prompt. kvtier's own
recordings also name the ``chunk_tokens`` and the ``finish_reason``. A file may be compressed with gzip.
"""

from __future__ import annotations

import codecs
import gzip
import io
import json
import pathlib
import zlib
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any

import attrs

from kvtier_core.errors import ConfigError, Problem
from kvtier_core.types import KEY_NBYTES, ChunkKey

#: Tokens of a chunk if the trace does not state it: those of Mooncake's traces.
CHUNK_TOKENS = 512

_GZIP = b"\x1f\x8b"
_UTF16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
_EXAMPLE = '{"timestamp": 27482, "input_length": 1301, "hash_ids": [46, 47, 2353]}'
#: Number of bad lines that are shown; the others are counted.
_SHOWN = 3


@attrs.frozen
class Prompt:
    """One request."""

    at: float  #: seconds since the trace began
    tokens: int
    path: tuple[ChunkKey, ...]
    hints: Mapping[str, str] = attrs.field(factory=dict, hash=False)  #: those of a client


@attrs.frozen
class Trace:
    """Prompts, and the number of tokens in a chunk."""

    name: str
    chunk_tokens: int
    prompts: tuple[Prompt, ...]  #: in order of time
    dropped: str = ""  #: file and number of the last line, if it ends before its request does

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
        return attrs.evolve(self, chunk_tokens=tokens, prompts=prompts)


def read_trace(path: pathlib.Path | str, chunk_tokens: int | None = None) -> Trace:
    """Read a file. ``chunk_tokens`` is for traces that do not state the length of a chunk.

    Raises ConfigError, which shows the first bad lines and counts the others.
    """
    path = pathlib.Path(path)
    usual = CHUNK_TOKENS if chunk_tokens is None else chunk_tokens
    names = _Names()
    prompts: list[Prompt] = []
    problems: list[Problem] = []
    dropped = ""
    for where, text in _lines(path):
        if _torn(text):
            dropped = where
            continue
        try:
            line = _parsed(text, where)
            said = line.count("chunk_tokens", default=usual, least=1)
            if chunk_tokens not in (None, said):
                raise line.wrong("chunk_tokens", f"{said}, but {chunk_tokens} before it; a trace has one chunk size")
            chunk_tokens = said
            prompts.append(_prompt(line, said, names))
        except ConfigError as error:
            problems += error.problems
    if problems:
        more = len(problems) - _SHOWN
        rest = [Problem(str(path), "$", f"{more} more lines like these")] if more > 0 else []
        raise ConfigError([*problems[:_SHOWN], *rest])
    if not prompts or chunk_tokens is None:
        raise ConfigError([Problem(str(path), "$", "it contains no prompts", f"each line is one, such as {_EXAMPLE}")])
    prompts.sort(key=lambda prompt: prompt.at)  # a recording has them in the order in which they ended
    begin = prompts[0].at
    shifted = tuple(attrs.evolve(each, at=each.at - begin) for each in prompts)
    return Trace(pathlib.Path(path.name.removesuffix(".gz")).stem, chunk_tokens, shifted, dropped)


class _Names:
    """Makes a key of an id and all ids before it, so that ids that depend on the content alone work too."""

    def __init__(self) -> None:
        self._keys: dict[tuple[ChunkKey | None, int], ChunkKey] = {}

    def path(self, ids: list[int]) -> tuple[ChunkKey, ...]:
        path: list[ChunkKey] = []
        parent = None
        for each in ids:
            fresh = ChunkKey(len(self._keys).to_bytes(KEY_NBYTES, "little"))
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
            raise self.wrong(field, f"expected a whole number of at least {least}, found {_shown(value)}")
        return value


def _lines(path: pathlib.Path) -> Iterator[tuple[str, bytes]]:
    """File and number of each line that is not empty, and the line."""
    try:
        with path.open("rb") as file, _unpacked(file) as lines:
            if lines.peek(2)[:2] in _UTF16:
                way_out = f"convert it: iconv -f UTF-16 -t UTF-8 {path}"
                raise ConfigError([Problem(str(path), "$", "it is UTF-16, expected UTF-8", way_out)])
            yield from ((f"{path}:{number}", text) for number, text in enumerate(lines, start=1) if text.strip())
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        way_out = f"save the intact part: gzip -dc {path} > trace.jsonl"
        raise ConfigError([Problem(str(path), "$", f"damaged gzip: {error}", way_out)]) from error
    except OSError as error:
        raise ConfigError([Problem(str(path), "$", f"cannot be read: {error.strerror}")]) from error


def _unpacked(file: io.BufferedReader) -> io.BufferedReader:
    return io.BufferedReader(gzip.GzipFile(fileobj=file)) if file.peek(2)[:2] == _GZIP else file


def _torn(text: bytes) -> bool:
    """Is this the last line of a recording whose engine was killed?"""
    return not text.endswith((b"}", b"\n"))


def _parsed(text: bytes, where: str) -> _Line:
    try:
        fields = json.loads(text)  # passes over a byte order mark
    except (ValueError, RecursionError) as error:
        raise ConfigError([Problem(where, "$", f"not JSON: {error}", f"each line is a request: {_EXAMPLE}")]) from error
    if not isinstance(fields, dict):
        raise ConfigError([Problem(where, "$", f"expected an object, found {_shown(fields)}")])
    return _Line(where, fields)


def _prompt(line: _Line, chunk_tokens: int, names: _Names) -> Prompt:
    at = line.value("timestamp")
    if type(at) not in (int, float) or not 0 <= at < 1e18:
        raise line.wrong("timestamp", f"expected milliseconds, found {_shown(at)}")
    tokens = line.count("input_length", least=1)
    ids = line.value("hash_ids")
    if not isinstance(ids, list) or not all(type(each) is int for each in ids):
        raise line.wrong("hash_ids", f"expected a list of whole numbers, found {_shown(ids)}")
    if ids and len(ids) not in (tokens // chunk_tokens, -(-tokens // chunk_tokens)):
        why = f"{len(ids)} ids, but {tokens} tokens are {tokens / chunk_tokens:.1f} chunks of {chunk_tokens}"
        raise line.wrong("hash_ids", why, "pass the number of tokens in a chunk: --chunk-tokens")
    hints = line.fields.get("hints", {})
    if not isinstance(hints, dict) or not all(isinstance(each, str) for each in hints.values()):
        raise line.wrong("hints", f"expected texts by name, found {_shown(hints)}")
    return Prompt(at / 1000, tokens, names.path(ids), hints)


def _shown(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
