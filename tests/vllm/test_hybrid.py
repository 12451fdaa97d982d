"""Models with several KV groups, as real engines serve them: bit-equal to the engine's own prefix hit."""

from __future__ import annotations

import pytest
import tiny_hybrids
from conftest import cpu_and_disk, prompt
from test_serving import forget, hits

MODELS = {"gemma3": tiny_hybrids.make_gemma3}


@pytest.fixture(scope="module", params=MODELS)
def hybrid(request, tmp_path_factory):
    path = tmp_path_factory.mktemp(request.param)
    MODELS[request.param](path)
    return {"model": path, "enable_prefix_caching": True}


def stack(path, **settings):
    return cpu_and_disk(path, chunk_tokens="auto", **settings)


def test_hits_are_the_engines_own(engine, said, hybrid, tmp_path):
    asked = prompt(60, 1050)
    with engine(stack(tmp_path), **hybrid) as first:
        print("\n".join(said()))
        first.ask(asked)
        own = first.ask(asked)[0]
        forget(first)
        said()
        warm = first.ask(asked)[0]
        print(hits(said()))
        first.assert_at_rest()
    with engine(stack(tmp_path), **hybrid) as second:
        said()
        again = second.ask(asked)[0]
        print(hits(said()))
    print(own.cached, warm.cached, again.cached, warm.differs(own), again.differs(own))
    assert own.cached == warm.cached == again.cached > 0
    assert warm.differs(own) == again.differs(own) == 0
