"""What a live server recorded, replayed: the simulator says what the server did."""

from __future__ import annotations

import json
import random

import pytest
from real_engines import BLOCK, CHUNK, cpu_and_disk, prompt

from kvtier_core.cli import main
from kvtier_core.config.load import load_config
from kvtier_core.config.registry import Registry
from kvtier_simulate.study import Study, layout_of
from kvtier_simulate.traces import read_trace

#: The tiny model's: layers, keys and values, heads, head size, float32.
TOKEN_NBYTES = 4 * 2 * 2 * 64 * 4
FRAME_NBYTES = 4096 + CHUNK * TOKEN_NBYTES


def recording(folder):
    return {"type": "recording", "path": str(folder / "traffic")}


def recorded(folder):
    (file,) = folder.glob("*.jsonl")
    return file


def conversations(seed, rounds):
    """Users who come back with all that was said before and some more, and some who never do."""
    rng = random.Random(seed)
    talks = [prompt(1000 * seed + user, 70) for user in range(5)]
    for turn in range(rounds):
        user = rng.randrange(len(talks))
        asked = talks[user] = prompt(turn, len(talks[user]) + rng.randrange(10, 200), talks[user])
        yield asked
        if len(asked) > 700 or rng.random() < 0.2:
            talks[user] = prompt(5000 + turn, 70, asked[: 64 * rng.randrange(3)])


@pytest.mark.more
def test_the_simulated_hits_of_a_recording_are_those_of_the_live_server(engine, tmp_path):
    """Memory for 12 chunks and a disk for 30: prompts are evicted, come up again, and are recomputed.

    By `lru`: a recording rounds times to milliseconds, and `gittins` goes by them. A real disk keeps a 64th of its
    capacity for its log of requests, a simulated one does not.
    """
    stack = cpu_and_disk(tmp_path / "disk", f"{12 * FRAME_NBYTES}B", observers=[recording(tmp_path)])
    for tier, frames in zip(stack["tiers"], (12, 31), strict=True):
        tier |= {"eviction": "lru", "capacity": f"{frames * FRAME_NBYTES}B"}
    live = []
    with engine(stack, max_num_batched_tokens=2048, max_num_seqs=1) as served:
        for asked in conversations(1, 60):
            live.append(served.ask(asked, tokens=1)[0].cached)
            served.settle()
        served.assert_at_rest()
    trace = read_trace(recorded(tmp_path / "traffic"))
    stack["tiers"][1]["capacity"] = f"{30 * FRAME_NBYTES}B"
    config = load_config(stack, Registry.discover())
    study = Study(trace, layout_of(CHUNK, TOKEN_NBYTES))
    hits = study.run(config).each
    # An engine computes at least one block, so that there is something to sample from.
    assert [min(hit, (each.tokens - 1) // BLOCK * BLOCK) for hit, each in zip(hits, trace.prompts, strict=True)] == live
    assert 0 < sum(live) < sum(study.bound(config).each)
    assert all(study.run(config).hits.values()), "a tier was of no use"


def test_a_recording_tells_nothing_but_what_it_should(engine, tmp_path, capsys):
    shared = prompt(1, 256)
    stack = cpu_and_disk(tmp_path / "disk", observers=[recording(tmp_path)])
    with engine(stack) as served:
        served.ask(prompt(2, 300, shared), tokens=3)
        served.ask(prompt(3, 300, shared), tokens=2, salt="alice")
        served.ask(prompt(4, 300, shared), tokens=2)
        database = served.connector.config.token_database.open(served.connector.side.namespace, CHUNK)
        (key, *_) = database.keys(shared)
    file = recorded(tmp_path / "traffic")
    text = file.read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    assert [set(line) for line in lines] == 3 * [
        {"timestamp", "input_length", "output_length", "chunk_tokens", "finish_reason", "hash_ids"}
    ]
    assert [(line["input_length"], line["output_length"], line["finish_reason"]) for line in lines] == [
        (300, 3, "length"),
        (300, 2, "length"),
        (300, 2, "length"),
    ]
    first, alice, second = (line["hash_ids"] for line in lines)
    assert first == second and len(set(first)) == 4, "all that they share is whole chunks"
    assert not set(first) & set(alice)
    assert key.hex() not in text and str(int.from_bytes(key[:8]) >> 1) not in text
    assert file.stat().st_mode & 0o777 == 0o600
    assert main(["simulate", str(file), "--capacity", "50%", "--policy", "lru,min"]) == 0
    assert "3 prompts" in capsys.readouterr().out
