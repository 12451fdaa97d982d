"""Prompts that a real engine keeps in memory, or brings there, as `kvtier pins` and `kvtier prefetch` tell it."""

from __future__ import annotations

import json

from real_engines import CHUNK, cpu_and_disk, hit, prompt
from test_status import begin, ended

ASKED = prompt(180, 4 * CHUNK + 5)
TOKENS = len(ASKED)
#: Room for 35 chunks: the pins of a tenant keep 4.
MEMORY = "9MiB"


def test_a_pinned_prompt_and_a_prefetched_one_are_hits_from_memory(engine, runtime, tmp_path):
    (tmp_path / "prompt.json").write_text(json.dumps(ASKED))
    file = str(tmp_path / "prompt.json")
    with engine(cpu_and_disk(tmp_path / "disk", MEMORY)) as served:
        truth = served.ask(ASKED)[0]
        served.settle()

        def told(*arguments):
            command = begin(*arguments)
            while command.poll() is None:  # the owner answers in a step
                served.ask([1, 2, 3])
            return ended(command)

        def flood(seed):
            served.ask(*(prompt(seed + number, TOKENS) for number in range(20)))
            served.settle()

        def outcome():
            (answer,) = served.ask(ASKED)
            assert answer.tokens == truth.tokens
            return served.outcomes()[-1]

        assert told("pins", "--add", "system", "--prompt", file) == "system: 4 chunks are kept, 0 may follow\n"
        flood(200)
        assert outcome() == hit(TOKENS, cpu=4 * CHUNK)
        assert told("pins", "--delete", "system") == "system: 4 slots are kept no longer\n"
        flood(300)
        assert outcome() == hit(TOKENS, disk=4 * CHUNK)
        flood(400)
        assert told("prefetch", "--prompt", file) == "4 chunks are on their way, 0 were in memory\n"
        served.settle()
        assert told("prefetch", "--prompt", file) == "0 chunks are on their way, 4 were in memory\n"
        found = outcome()
        assert (found.loaded, found.waited) == (4 * CHUNK, 0.0)
        served.assert_at_rest()
