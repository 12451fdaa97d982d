"""Sizes, times and namespaces: what they accept, and the numbers that must never change."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier_core.types import Namespace, Nbytes, Seconds

FACTS = {"model": "golden", "block": 16}

#: From hashlib by hand: blake2b of `[["block","16"],["model","golden"]]`, personalised with `kvtier-ns`.
GOLDEN = "529ad0bb679655765f1c167f8aae32926e01a523eb153bc4e70003b143cbf9d1"


# -- sizes and times -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("0B", 0),
        ("500B", 500),
        ("1KiB", 1 << 10),
        ("12 MiB", 12 << 20),
        (" 8GiB ", 8 << 30),
        ("3TiB", 3 << 40),
        ("2PiB", 2 << 50),
    ],
)
def test_a_size_is_parsed_to_bytes(text, nbytes):
    parsed = Nbytes.parse(text)
    assert parsed == nbytes
    assert type(parsed) is Nbytes


@pytest.mark.parametrize("text", ["", "8", "GiB", "500GB", "8gib", "1.5GiB", "-1B", "1GiB 2MiB", "8GiB!"])
def test_a_malformed_size_is_refused(text):
    with pytest.raises(ValueError) as caught:
        Nbytes.parse(text)
    assert str(caught.value) == f"{text!r} is not a size; write a whole number and B, KiB, MiB, GiB, TiB or PiB"


@pytest.mark.parametrize("text", ["0B", "1023B", "1KiB", "1025B", "512MiB", "8GiB", "20TiB", "1PiB", "2048PiB"])
def test_a_size_is_told_in_its_largest_unit(text):
    assert str(Nbytes.parse(text)) == text
    assert f"{Nbytes.parse(text)}" == text


@given(st.integers(0, 1 << 64))
def test_a_size_survives_being_told(nbytes):
    assert Nbytes.parse(str(Nbytes(nbytes))) == nbytes


@pytest.mark.parametrize(
    ("text", "seconds"), [("500ms", 0.5), ("2s", 2.0), ("0s", 0.0), ("1.5 s", 1.5), (" 1min ", 60.0), ("0.5min", 30.0)]
)
def test_a_length_of_time_is_parsed_to_seconds(text, seconds):
    parsed = Seconds.parse(text)
    assert parsed == seconds
    assert type(parsed) is Seconds


@pytest.mark.parametrize("text", ["", "2", "s", "1h", "2 sec", "-1s", ".5s", "1e3s", "1s 2ms"])
def test_a_malformed_length_of_time_is_refused(text):
    with pytest.raises(ValueError) as caught:
        Seconds.parse(text)
    assert str(caught.value) == f"{text!r} is not a duration; write a number and ms, s or min"


def test_a_time_is_told_in_seconds():
    assert [str(Seconds.parse(text)) for text in ("500ms", "2s", "1min", "1.25s")] == ["0.5s", "2s", "60s", "1.25s"]


@given(st.integers(0, 30 * 24 * 3600 * 1000))
def test_a_time_survives_being_told(milliseconds):
    seconds = Seconds.parse(f"{milliseconds}ms")
    assert Seconds.parse(str(seconds)) == pytest.approx(seconds, rel=1e-9)


# -- namespaces ----------------------------------------------------------------------------------------


def test_the_digest_of_a_namespace_is_golden():
    assert Namespace.of(FACTS).digest.hex() == GOLDEN


def test_the_order_of_facts_does_not_matter():
    assert Namespace.of(dict(reversed(FACTS.items()))) == Namespace.of(FACTS)
    assert Namespace.of(dict(reversed(FACTS.items()))).digest.hex() == GOLDEN


@pytest.mark.parametrize(
    "facts",
    [
        {},
        {"model": "golden"},
        {**FACTS, "block": 32},
        {**FACTS, "Model": "golden"},
        {**FACTS, "epoch": ""},
        {"model": "16", "block": "golden"},
        {"model": 'golden"],["x","y', "block": 16},
    ],
)
def test_one_differing_fact_is_another_namespace(facts):
    assert Namespace.of(facts).digest.hex() != GOLDEN


@given(*[st.dictionaries(st.text(max_size=3), st.text(max_size=3), max_size=3)] * 2)
def test_facts_never_run_into_each_other(ours, theirs):
    assert (Namespace.of(ours).digest == Namespace.of(theirs).digest) == (ours == theirs)
