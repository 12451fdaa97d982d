"""Traces as they are found: Mooncake's, kvtier's own, and garbage, which is told with its line."""

from __future__ import annotations

import gzip
import json

import pytest

from kvtier_core.errors import ConfigError
from kvtier_simulate.traces import read_trace

EXAMPLE = '{"timestamp": 27482, "input_length": 1301, "hash_ids": [46, 47, 2353]}'
EACH = f"each line is a request: {EXAMPLE}"
LINE = {"timestamp": 1000, "input_length": 1300, "output_length": 52, "hash_ids": [46, 47, 2353]}


@pytest.fixture
def written(tmp_path):
    def write(*lines, end="\n"):
        file = tmp_path / "trace.jsonl"
        file.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines) + end)
        return file

    return write


def ids(trace):
    """Of each prompt, with keys told apart by their first appearance."""
    names: dict[bytes, int] = {}
    return [[names.setdefault(key, len(names)) for key in prompt.path] for prompt in trace.prompts]


def test_mooncakes_lines_are_prompts(written):
    trace = read_trace(written(LINE, {**LINE, "timestamp": 2500, "hash_ids": [46, 47, 9]}))
    assert (trace.name, trace.chunk_tokens, trace.accesses, trace.distinct, trace.tokens) == ("trace", 512, 6, 4, 2600)
    assert [prompt.at for prompt in trace.prompts] == [0.0, 1.5]
    assert ids(trace) == [[0, 1, 2], [0, 1, 3]]
    assert trace.tokens_in(trace.prompts[0], 2) == 1024
    assert trace.tokens_in(trace.prompts[0], 3) == 1300


def test_an_id_means_itself_and_all_before_it(written):
    """As in traces whose ids are of content, not of prefixes."""
    trace = read_trace(written({**LINE, "hash_ids": [1, 2, 1]}, {**LINE, "hash_ids": [2, 1]}))
    assert ids(trace) == [[0, 1, 2], [3, 4]]


def test_prompts_are_sorted_by_time(written):
    trace = read_trace(written(LINE, {**LINE, "timestamp": 400, "hash_ids": [5], "input_length": 500}))
    assert [len(prompt.path) for prompt in trace.prompts] == [1, 3]
    assert trace.prompts[0].at == 0.0


def test_a_recording_says_how_long_its_chunks_are(written):
    assert read_trace(written({**LINE, "chunk_tokens": 600})).chunk_tokens == 600
    assert read_trace(written(LINE), 600).chunk_tokens == 600


def test_a_prompt_that_could_not_be_identified_has_no_ids(written):
    """Nothing of it is ever a hit, and its tokens count all the same."""
    trace = read_trace(written(LINE, {**LINE, "hash_ids": []}))
    assert (ids(trace), trace.tokens) == ([[0, 1, 2], []], 2600)


def test_chunks_can_be_put_together(written):
    """Of five the last one is left over; two prompts that share three chunks share one double chunk."""
    first = {**LINE, "input_length": 2600, "hash_ids": [1, 2, 3, 4, 5, 6]}
    trace = read_trace(written(first, {**first, "hash_ids": [1, 2, 3, 7, 8]}))
    longer = trace.in_chunks_of(1024)
    assert (longer.chunk_tokens, ids(longer)) == (1024, [[0, 1, 2], [0, 3]])
    assert longer.tokens_in(longer.prompts[0], 3) == 2600
    assert [trace.in_chunks_of(tokens) is trace for tokens in (1, 512, 256, 700)] == [True] * 4


def test_the_last_line_of_a_killed_engine_is_passed_over_and_named(written):
    file = written(LINE, '{"timestamp": 12, "inp', end="")
    assert (len(read_trace(file).prompts), read_trace(file).dropped) == (1, f"{file}:2")
    assert read_trace(file).in_chunks_of(1024).dropped == f"{file}:2"
    whole = read_trace(written(LINE, LINE, end=""))
    assert (len(whole.prompts), whole.dropped) == (2, "")


def test_a_trace_may_be_compressed(written, tmp_path):
    plain = written(LINE, {**LINE, "timestamp": 2500, "hash_ids": [46, 47, 9]})
    packed = tmp_path / "trace.jsonl.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    assert read_trace(packed) == read_trace(plain)


def test_a_byte_order_mark_is_passed_over(written, tmp_path):
    plain, marked = written(LINE), tmp_path / "marked" / "trace.jsonl"
    marked.parent.mkdir()
    marked.write_bytes(b"\xef\xbb\xbf" + plain.read_bytes())
    assert read_trace(marked) == read_trace(plain)


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("nonsense", ":2: $: not JSON: Expecting value: line 1 column 1 (char 0); " + EACH),
        ('{"timestamp": 12', ":2: $: not JSON: Expecting ',' delimiter: line 2 column 1 (char 17); " + EACH),
        ([1, 2], ":2: $: expected an object, found [1, 2]"),
        ({"timestamp": 0, "input_length": 3}, ":2: $: 'hash_ids' is missing"),
        ({**LINE, "timestamp": "noon"}, ':2: $.timestamp: expected milliseconds, found "noon"'),
        ({**LINE, "timestamp": float("nan")}, ":2: $.timestamp: expected milliseconds, found NaN"),
        ({**LINE, "input_length": -3}, ":2: $.input_length: expected a whole number of at least 1, found -3"),
        ({**LINE, "input_length": True}, ":2: $.input_length: expected a whole number of at least 1, found true"),
        ({**LINE, "hints": {"session": 1}}, ':2: $.hints: expected texts by name, found {"session": 1}'),
        ({**LINE, "hash_ids": 5}, ":2: $.hash_ids: expected a list of whole numbers, found 5"),
        ({**LINE, "hash_ids": [1, "b"]}, ':2: $.hash_ids: expected a list of whole numbers, found [1, "b"]'),
        ({**LINE, "hash_ids": "x" * 50}, ":2: $.hash_ids: expected a list of whole numbers, "
         'found "' + 36 * "x" + "..."),
        ({**LINE, "hash_ids": [1, 2, 3, 4]}, ":2: $.hash_ids: 4 ids, but 1300 tokens are 2.5 chunks of 512; "
         "pass the number of tokens in a chunk: --chunk-tokens"),
        ({**LINE, "chunk_tokens": 1024}, ":2: $.chunk_tokens: 1024, but 512 before it; a trace has one chunk size"),
    ],
)  # fmt: skip
def test_garbage_is_reported_with_its_line(written, line, told):
    file = written(LINE, line, LINE)
    with pytest.raises(ConfigError) as raised:
        read_trace(file)
    assert str(raised.value) == f"{file}{told}"


def told(file):
    with pytest.raises(ConfigError) as raised:
        read_trace(file)
    return str(raised.value).replace(str(file), "FILE").splitlines()


def test_all_bad_lines_are_counted_and_the_first_shown(written):
    bad = {**LINE, "input_length": 0}
    said = [f"FILE:{i}: $.input_length: expected a whole number of at least 1, found 0" for i in (2, 3, 4, 5)]
    assert told(written(LINE, bad, bad, bad, LINE)) == said[:3]
    assert told(written(LINE, *[bad] * 9, LINE)) == [*said[:3], "FILE: $: 6 more lines like these"]


def test_a_file_that_is_no_trace_is_refused_with_a_way_out(tmp_path, written):
    file = tmp_path / "file"
    assert told(file) == ["FILE: $: cannot be read: No such file or directory"]
    assert told(written("")) == [f"FILE: $: it contains no prompts; each line is one, such as {EXAMPLE}"]
    file.write_bytes(b"")
    assert told(file) == [f"FILE: $: it contains no prompts; each line is one, such as {EXAMPLE}"]
    for order in ("utf-16-le", "utf-16-be"):
        file.write_bytes(("\ufeff" + json.dumps(LINE)).encode(order))
        way_out = "convert it: iconv -f UTF-16 -t UTF-8 FILE"
        assert told(file) == [f"FILE: $: it is UTF-16, expected UTF-8; {way_out}"]
    file.write_bytes(gzip.compress(json.dumps(LINE).encode())[:-9])
    (said,) = told(file)
    assert said.startswith("FILE: $: damaged gzip: Compressed file ended before")
    assert said.endswith("; save the intact part: gzip -dc FILE > trace.jsonl")
    file.write_bytes(b"\x80\n")
    (said,) = told(file)
    assert said.startswith("FILE:1: $: not JSON: 'utf-8' codec can't decode byte 0x80")
