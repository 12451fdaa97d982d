"""Text from outside: what is shown of it, and what stands for it."""

from __future__ import annotations

import pytest
from outsiders import TEXTS, assert_tame

from kvtier_core.outside import BEGINNING, LONGEST, printable, stand_in


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_what_is_shown_is_a_line_of_bounded_length(text):
    assert_tame(printable(text), longest=LONGEST)
    assert printable(printable(text)) == printable(text)


@pytest.mark.parametrize("text", ["", "cmpl-7-0-1234abcd", "ein Wort: größer, 中文", "x" * LONGEST, "a\\nb"])
def test_text_that_is_printable_and_short_stays_as_it_is(text):
    assert printable(text) == stand_in(text) == text


def test_texts_that_begin_alike_differ():
    alike = ["x" * LONGEST, "x" * (LONGEST + 1), "x" * (LONGEST + 2), "x" * LONGEST + "y", "x" * LONGEST + "\ud800"]
    assert len({printable(text) for text in alike}) == len({stand_in(text) for text in alike}) == len(alike)
    assert {printable(text)[:BEGINNING] for text in alike} == {"x" * BEGINNING}


def test_text_is_escaped_before_it_is_cut():
    assert_tame(printable("\0" * LONGEST), longest=LONGEST)
    assert printable("\0" * LONGEST) != printable("\0" * (LONGEST - 1))


def test_no_text_stands_for_itself_and_for_another():
    long = "x" * (LONGEST + 1)
    assert len(stand_in(long)) > LONGEST and stand_in(stand_in(long)) != stand_in(long)
