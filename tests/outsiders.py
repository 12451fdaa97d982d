"""Texts that somebody outside may choose, and what may be shown of them."""

from __future__ import annotations

#: By what is wrong with them. Each has a beginning of its own, by which a test finds it again.
TEXTS = {
    "long": "long" + "x" * (5 << 20),
    "a line": "a line\n2026-11-29 WARNING kvtier: forged",
    "a return": "a return\rforged",
    "escapes": "escapes\33[2J\33]0;forged\7\x9b31m",
    "surrogates": "surrogates\udc80\ud800",
    "NUL": "NUL\0behind",
    "right to left": "right to left\u202e\u2066",
    "separators": "separators\u2028\u2029\x85",
}


def assert_tame(*lines: str, longest: int = 600) -> None:
    """Each is one line that a terminal only shows, of bounded length."""
    for line in lines:
        assert line.isprintable(), ascii(line[:1000])
        assert len(line) <= longest, line[:1000]
