"""Reads single values: text, paths, numbers, sizes, times, and words from a list of choices."""

from __future__ import annotations

import contextlib
import difflib
import pathlib
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any

import attrs

from kvtier_core.config.model import Config
from kvtier_core.config.yaml_nodes import Node, Plain, path_of, shown
from kvtier_core.types import EnvSecret, Nbytes, Seconds


@attrs.frozen
class Unavailable:
    """The reason why no plugin has a name, and what to do about it."""

    why: str
    hint: str = ""


#: Finds the Config class with a name in a family of Configs.
Choose = Callable[[type[Config], str], type[Config] | Unavailable]
#: Reads the value of a node; raises ConfigError.
Read = Callable[[Node, Choose], Any]


def read_text(node: Node, _: Choose) -> str:
    """Read text. Raises ConfigError."""
    if not isinstance(node.value, str):
        raise node.wrong(f"expected text, found {shown(node.value)}")
    return str(node.value)


def number(kind: type[int | float], words: Collection[str] = ()) -> Read:
    """A function that reads a number of this kind, or one of the words."""
    pattern, also, noun = NUMBERS[kind]
    expected = " or ".join([noun, *map(repr, words)])

    def read(node: Node, _: Choose) -> Any:
        if isinstance(node.value, str) and node.value in words:
            return str(node.value)
        fits = re.fullmatch(pattern, node.value) if isinstance(node.value, Plain) else type(node.value) in also
        if fits and isinstance(node.value, int | float | Plain):
            with contextlib.suppress(OverflowError):
                return kind(node.value)
        hint = guess(node.value, words) if isinstance(node.value, str) else ""
        raise node.wrong(f"expected {expected}, found {shown(node.value)}", hint)

    return read


def _read_bool(node: Node, _: Choose) -> bool:
    words = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
    if isinstance(node.value, bool):
        return node.value
    if isinstance(node.value, Plain) and node.value.lower() in words:
        return words[node.value.lower()]
    raise node.wrong(f"expected true or false, found {shown(node.value)}")


def _parsed(parse: Callable[[str], Any], text: Read = lambda node, _: node.text()) -> Read:
    """A function that reads a text and parses it; ``parse`` raises ValueError."""

    def read(node: Node, choose: Choose) -> Any:
        try:
            return parse(text(node, choose))
        except ValueError as error:
            raise node.wrong(str(error)) from error

    return read


def _amount(unit: type[Nbytes | Seconds]) -> Read:
    def parse(text: str) -> Nbytes | Seconds:
        if (value := unit.parse(text)) >= 1 << 62:  # system calls take signed 64-bit numbers
            raise ValueError(f"{text!r} exceeds the largest supported size")
        return value

    return _parsed(parse)


def one_of(choices: Mapping[str, Any]) -> Read:
    """A function that reads one of the words, as the value that it stands for."""

    def read(node: Node, _: Choose) -> Any:
        text = node.text()
        if text not in choices or isinstance(node.value, bool):
            raise node.wrong(f"{shown(node.value)} is not one of {', '.join(choices)}", guess(text, choices))
        return choices[text]

    return read


def guess(word: str, known: Collection[str]) -> str:
    """A hint if ``word`` looks like one of the known words."""
    close = difflib.get_close_matches(word, sorted(known), 1)
    return f"did you mean '{close[0]}'?" if close else ""


#: By annotation.
SCALARS: dict[Any, Read] = {
    EnvSecret: _parsed(EnvSecret.parse),
    str: read_text,
    bool: _read_bool,
    pathlib.Path: _parsed(path_of, read_text),
    Nbytes: _amount(Nbytes),
    Seconds: _amount(Seconds),
}
#: For each type of number: its pattern in YAML, the plain types that are accepted, and its name in messages.
NUMBERS: dict[Any, tuple[str, tuple[type, ...], str]] = {
    int: (r"[-+]?(0|[1-9][0-9]{0,17})", (int,), "a whole number"),
    float: (r"[-+]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][-+]?[0-9]+)?", (int, float), "a number"),
}
