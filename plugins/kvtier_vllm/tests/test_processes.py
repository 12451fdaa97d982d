"""vLLM as people run it: scheduler and workers in processes of their own, one rank or two."""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest
from real_engines import Engine, Outcome, cpu_and_disk, hit, prompt, told_by_engines
from sizes import some
from test_serving import NOISE

ASKED = prompt(80, 530), prompt(81, 530)
FORKED = {"VLLM_WORKER_MULTIPROC_METHOD": "fork"}


def ask_twice(model: str, stack: dict, options: dict, at_once: bool = True) -> list:
    """In another process."""
    engine = Engine(Path(model), stack, **options)
    batches = [ASKED] if at_once else [[each] for each in ASKED]
    rows = [[answer for batch in batches for answer in engine.ask(*batch)] for _ in range(2)]
    told = told_by_engines()
    engine.llm.llm_engine.engine_core.shutdown()
    return [*([[a.tokens, a.logprobs, a.cached] for a in row] for row in rows), told]


def run(fork_server, model, stack, environment=FORKED, at_once=True, **options):
    """Answers of two passes over two prompts, by an engine with processes of its own, outcomes, and their log.

    Asked at once, both may be in one batch or not, as their loads end, which changes how bfloat16 is rounded.
    """
    environment = {
        **environment,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
    }
    arguments = {"model": str(model), "stack": stack, "options": options, "at_once": at_once}
    (cold, warm, [told]), log = fork_server.run("test_processes:ask_twice", environment, **arguments)
    return cold, warm, [Outcome.of(each) for each in told], log


def largest_difference(answers, truth):
    """Of log-probabilities; the tokens must be equal."""
    largest = 0.0
    for (tokens, logprobs, _), (true_tokens, true_logprobs, _) in zip(answers, truth, strict=True):
        assert tokens == true_tokens
        largest = max([largest, *(abs(a - b) for a, b in zip(logprobs, true_logprobs, strict=True))])
    return largest


def polls() -> bool:
    """Does this process, or one that it spawns, give its core away only to get it back at once?"""
    ask = "import os, sys; sys.exit(type(os.sched_yield).__name__ == 'builtin_function_or_method')"
    return isinstance(os.sched_yield, types.BuiltinFunctionType) or bool(subprocess.call([sys.executable, "-c", ask]))


@pytest.mark.more
def test_processes_of_engines_sleep_where_they_would_poll(fork_server):
    """Otherwise they take the cores of other tests."""
    assert fork_server.run("test_processes:polls", FORKED)[0] is False


@pytest.fixture(scope="module")
def truth(model):
    """What one rank in this process says without kvtier."""
    plain = Engine(model, None)
    answers = plain.ask(*ASKED)
    plain.close()
    return [(list(answer.tokens), answer.logprobs, answer.cached) for answer in answers]


@pytest.fixture(scope="module", params=some([1, 2]))
def start(request, fork_server, model, tmp_path_factory):
    """``start()`` is `run` with so many ranks, each time over the same folder."""
    options = {"tensor_parallel_size": 2} if request.param == 2 else {}
    return functools.partial(run, fork_server, model, cpu_and_disk(tmp_path_factory.mktemp("store")), **options)


@pytest.fixture(scope="module")
def first(start):
    """What came of the first engine. With two ranks vLLM spawns its processes, as it does on its own."""
    return start({}) if "tensor_parallel_size" in start.keywords else start()


def test_the_default_mode_keeps_and_reuses(first, truth):
    cold, warm, outcomes, _ = first
    assert [cached for *_, cached in cold] == [0, 0]
    assert [cached for *_, cached in warm] == [512, 512]
    assert outcomes[2:] == [hit(530, cpu=512)] * 2
    for answers in (cold, warm):
        assert largest_difference(answers, truth) < NOISE


def test_each_process_logs_each_line_once_in_the_format_of_vllm(first):
    """The scheduler's and each worker's; what is logged by a plain `logging.getLogger` has no such format."""
    *_, log = first
    lines = [line for line in log.splitlines() if "kvtier: " in line]
    form = re.compile(r"\((?P<process>\S+) pid=\d+\) (INFO|WARNING) \S+ \S+ \[\w+\.py:\d+\] kvtier: \S.*")
    found = [form.fullmatch(line) for line in lines]
    assert all(found), lines
    assert {match["process"].partition("_")[0] for match in found} >= {"EngineCore"}
    assert sum("kvtier: identity " in line for line in lines) == 1
    assert len(set(lines)) == len(lines)


def test_another_engine_finds_it_on_disk(first, start, truth):
    disk, _, outcomes, _ = start()
    assert [cached for *_, cached in disk] == [512, 512]
    assert outcomes[:2] == [hit(530, disk=512)] * 2
    assert largest_difference(disk, truth) < NOISE
