"""vLLM as people run it: scheduler and workers in processes of their own, one rank or two."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import Engine, cpu_and_disk, prompt

SCRIPT = """
import json, sys
from conftest import Engine, prompt

model, stack, options = json.loads(sys.argv[1])
engine = Engine(model, stack, **options)
first, second = prompt(80, 530), prompt(81, 530)
rows = [engine.ask(first, second), engine.ask(first, second)]
engine.llm.llm_engine.engine_core.shutdown()
print("RESULT", json.dumps([[[a.tokens, a.logprobs, a.cached] for a in row] for row in rows]))
"""


def run(model, stack, **options):
    """Answers of two passes over two prompts, by an engine started as `vllm serve` does."""
    environment = {
        **os.environ,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "0|1" if options.get("tensor_parallel_size") else "0",
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)]),
    }
    command = [sys.executable, "-c", SCRIPT, json.dumps([str(model), stack, options])]
    process = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    results = [line for line in process.stdout.splitlines() if line.startswith("RESULT")]
    assert results, process.stdout[-3000:] + process.stderr[-3000:]
    return json.loads(results[-1].removeprefix("RESULT")), process.stdout + process.stderr


def largest_difference(answers, truth):
    """Of log-probabilities; the tokens must be equal."""
    largest = 0.0
    for (tokens, logprobs, _), (true_tokens, true_logprobs, _) in zip(answers, truth, strict=True):
        assert tokens == true_tokens
        largest = max([largest, *(abs(a - b) for a, b in zip(logprobs, true_logprobs, strict=True))])
    return largest


@pytest.fixture(scope="module")
def truth(model):
    """What one rank in this process says without kvtier."""
    plain = Engine(model, None)
    answers = plain.ask(prompt(80, 530), prompt(81, 530))
    plain.close()
    return [(list(answer.tokens), answer.logprobs, answer.cached) for answer in answers]


@pytest.fixture(scope="module", params=[1, 2])
def start(request, model, tmp_path_factory):
    """``start()`` is `run` with so many ranks, each time over the same folder."""
    options = {"tensor_parallel_size": 2} if request.param == 2 else {}
    return functools.partial(run, model, cpu_and_disk(tmp_path_factory.mktemp("store")), **options)


@pytest.fixture(scope="module")
def first(start):
    """What came of the first engine."""
    return start()


def test_the_default_mode_keeps_and_reuses(first, truth):
    (cold, warm), log = first
    assert [cached for *_, cached in cold] == [0, 0]
    assert [cached for *_, cached in warm] == [512, 512]
    assert "hit 512 of 530 tokens: cpu 512" in log
    for answers in (cold, warm):
        assert largest_difference(answers, truth) < 1e-3


def test_another_engine_finds_it_on_disk(first, start, truth):
    (disk, _), log = start()
    assert [cached for *_, cached in disk] == [512, 512]
    assert "hit 512 of 530 tokens: disk 512" in log
    assert largest_difference(disk, truth) < 1e-3
