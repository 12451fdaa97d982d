"""Steps of real engines, as their schedulers see them, and what the engines were asked for.

    python plugins/kvtier_vllm/tests/recorded_steps.py    # four minutes on a quiet machine; writes recorded_steps.jsonl

Each engine is asked for prompts of several lengths, one or several at once, of which the first tokens are held; just
before or after each, for as long ones of which nothing is held. A machine that becomes slower meanwhile is so for both.
"""

from __future__ import annotations

import itertools
import json
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

import attrs

RECORDED = Path(__file__).with_suffix(".jsonl")
#: Settings of the engines, by name.
ENGINES: dict[str, dict[str, Any]] = {"whole prompts": {}, "pieces of 512 tokens": {"max_num_batched_tokens": 512}}
TIMES = 8


@attrs.frozen
class Asked:
    """Prompts that come at once."""

    prompts: int
    tokens: int  #: of each
    held: int  #: the tokens of each that are loaded


#: Each is asked for `TIMES` times.
HELD = [
    Asked(1, 500, 448),
    Asked(1, 1000, 512),
    Asked(1, 1000, 960),
    Asked(1, 1900, 768),
    Asked(1, 1900, 1856),
    Asked(3, 500, 448),
    Asked(3, 600, 256),
]


def record(folder: Path, settings: dict[str, Any]) -> list[list[Any]]:
    """What an engine was asked for, and its steps: what each computed, when it was planned, and when it ended."""
    from real_engines import Engine, cpu, prompt

    from kvtier_core.engine.scheduler.prefill_speed import PrefillSpeed

    told: list[list[Any]] = []

    class Told(PrefillSpeed):
        def ended(self, now: float) -> None:
            step, planned = self._planned[0]
            if step.prompt or step.decoded:
                told.append(["step", *attrs.astuple(step), planned, now])
            super().ended(now)

    engine = Engine(folder, cpu("512MiB"), kv_cache_memory_bytes=256 << 20, **settings)
    engine.connector.side._waiting.speed = Told()
    draw, seeds = random.Random(0), itertools.count()
    order = [asked for _ in range(TIMES) for asked in draw.sample(HELD, len(HELD))]
    pairs = (draw.sample([asked, attrs.evolve(asked, held=0)], 2) for asked in order)
    for asked in itertools.chain.from_iterable(pairs):
        prefixes = [prompt(next(seeds), asked.held) for _ in range(asked.prompts)]
        if asked.held:
            engine.ask(*(prompt(next(seeds), asked.held + 1, prefix) for prefix in prefixes), tokens=1)
            engine.settle()
        engine.outcomes()
        told.append(["asked", *attrs.astuple(asked)])
        engine.ask(*(prompt(next(seeds), asked.tokens, prefix) for prefix in prefixes), tokens=1)
        assert [outcome.loaded for outcome in engine.outcomes()] == [asked.held] * asked.prompts
        told.append(["answered"])
        engine.settle()
        engine.ask(prompt(next(seeds), 40), tokens=draw.randrange(4, 12))  # something is decoded, too
        engine.settle()
    engine.close()
    return [[*(round(each, 5) if isinstance(each, float) else each for each in entry)] for entry in told]


def main() -> None:
    sys.path[:0] = [str(Path(__file__).parents[3] / each) for each in ("tests", "examples")]
    import tiny_llama
    import torch  # what follows needs vLLM, which tests that replay do not

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        tiny_llama.make(Path(folder, "model"))
        found = {name: record(Path(folder, "model"), settings) for name, settings in ENGINES.items()}
    with RECORDED.open("w") as file:
        for name, entries in found.items():
            file.writelines(f"{json.dumps([name, *entry])}\n" for entry in entries)


if __name__ == "__main__":
    main()
