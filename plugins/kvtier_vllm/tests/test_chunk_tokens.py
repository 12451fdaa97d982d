"""`chunk_tokens: auto`: an engine finds its own size of chunks, the same one in every process."""

from __future__ import annotations

import pytest
from real_engines import BLOCK, Engine, cpu_and_disk, hit, miss, prompt
from test_processes import ASKED, largest_difference, run
from test_serving import NOISE, forget

#: KV of a token: layers, keys and values, heads, head size, float32.
TOKEN_NBYTES = 8 * 2 * 2 * 64 * 4
#: Four blocks of 256 KiB are the first frame of 1 MiB. Of one rank's half of the heads it would take eight.
FOUND = "kvtier: chunk_tokens: auto -> 128: a chunk takes 1028KiB"


@pytest.fixture(scope="module")
def deep(tmp_path_factory):
    """With so much KV that neither bound decides."""
    import tiny_llama

    path = tmp_path_factory.mktemp("deep")
    tiny_llama.make(path, layers=8)
    return path


@pytest.fixture
def stack(tmp_path):
    """That says nothing of chunks."""
    stack = cpu_and_disk(tmp_path / "store")
    del stack["chunk_tokens"]
    return stack


def test_the_arithmetic_of_this_file():
    assert 4 * BLOCK * TOKEN_NBYTES == 1 << 20


def test_an_engine_finds_its_size_of_chunks_and_hits_in_it(engine, said, deep, stack):
    asked = prompt(100, 420)
    with engine(stack, model=deep, enable_prefix_caching=True) as served:
        assert FOUND in said()
        served.ask(prompt(101, 127))
        assert served.outcomes() == [miss(127, "less than one chunk of 128 tokens to look up")]
        served.ask(asked[: 3 * 128 + 1])
        (own,) = served.own_hits(asked)
        forget(served)
        served.outcomes()
        warm = served.ask(asked)[0]
        assert served.outcomes() == [hit(420, cpu=384)]
        served.assert_at_rest()
    with engine(stack, model=deep, enable_prefix_caching=True) as second:
        again = second.ask(asked)[0]
        assert second.outcomes() == [hit(420, disk=384)]
    assert own.cached == warm.cached == again.cached == 384
    assert warm.differs(own) == again.differs(own) == 0


@pytest.mark.more
def test_two_ranks_find_what_one_would(fork_server, deep, stack):
    """In four processes: the scheduler's stack and each worker's table have the same chunks, or nothing would fit."""
    plain = Engine(deep, None)
    truth = plain.ask(*ASKED)
    plain.close()
    cold, warm, _, log = run(fork_server, deep, stack, tensor_parallel_size=2)
    assert FOUND in log
    assert "kvtier: self-test: every byte came back; kvtier is ready" in log
    assert [cached for *_, cached in cold] == [0, 0]
    assert [cached for *_, cached in warm] == [512, 512]
    for answers in (cold, warm):
        assert largest_difference(answers, [(list(a.tokens), a.logprobs, a.cached) for a in truth]) < NOISE
