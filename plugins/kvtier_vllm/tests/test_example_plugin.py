"""Real vLLM over the example that `kvtier new` copies: hits come up from it, and answers stay the same."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from real_engines import CHUNK, cpu, prompt

PROJECT = Path(__file__).parents[3] / "plugins/kvtier_testing/examples/backend"


@pytest.mark.more
def test_an_engine_stores_in_the_example_and_loads_from_it(engine, tmp_path, monkeypatch):
    info = tmp_path / "kvtier_example_backend-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: kvtier-example-backend\nVersion: 0.1.0\n")
    (info / "entry_points.txt").write_text("[kvtier.v1]\nexample-backend = kvtier_example_backend.plugin\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert str(PROJECT) in sys.path
    stack = cpu("2MiB")
    stack["tiers"].append({"type": "example-backend", "capacity": "1GiB"})
    prompts = [prompt(seed, 5 * CHUNK) for seed in range(80, 88)]
    with engine(cpu("64MiB")) as alone:
        expected = [alone.ask(each)[0] for each in prompts]
    with engine(stack) as served:
        for each in prompts:
            served.ask(each)
            served.settle()
        arena, store = served.manager.usage()
        assert store.chunks == 8 * 5 > arena.chunks, "the arena holds all: nothing would be loaded from the example"
        for each, answer in zip(prompts, expected, strict=True):
            (again,) = served.ask(each)
            assert again.cached >= 4 * CHUNK
            assert again.differs(answer) < 1e-3
            served.settle()
        served.assert_at_rest()
