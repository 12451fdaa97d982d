"""What kvtier does, shown on a real vLLM: `make demo`.

Four passes over prompts that share a long beginning: without kvtier, cold, warm, and in a new process
whose memory is empty, so that the KV comes from disk. Fails if an answer is not the one without kvtier.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

SHARED, OWN = 512, 18  # tokens: a beginning that both prompts have, and an end of their own
ANSWER = 12

STACK = """\
version: 1
tiers:
  - {{type: cpu,  capacity: 256MiB}}
  - {{type: disk, path: {folder}, capacity: 1GiB, min_free: 64MiB}}
"""

#: What a process prints before its result, which is one line of JSON.
_RESULT = "RESULT "


def main() -> int:
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="kvtier-demo-") as folder:
        model, config = Path(folder, "model"), Path(folder, "kvtier.yaml")
        say("making a small Llama whose answers depend on every token before them")
        from tiny_llama import make

        make(model)
        config.write_text(STACK.format(folder=Path(folder, "store")))
        print(config.read_text())

        say("real vLLM without kvtier, for the right answers (an engine starts in about 15 s)")
        truth = run_pass(model, None, ["-", "-"])
        say("real vLLM with kvtier: one pass stores, one is served from memory")
        served = run_pass(model, config, ["1 (cold)", "2 (warm)"])
        say("a new process: its memory is empty, the disk is not")
        served += run_pass(model, config, ["3 (new process)"])
    print_table(truth, served)
    return judge(truth, served, time.monotonic() - began)


def say(what: str) -> None:
    print(f"== {what}", flush=True)


def run_pass(model: Path, config: Path | None, passes: list[str]) -> list[dict]:
    """The answers of an engine in a process of its own."""
    command = [sys.executable, __file__, str(model), str(config or ""), *passes]
    environment = {
        **os.environ,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        # The same for all: left alone, vLLM gives an engine with a connector other threads than one without.
        "VLLM_CPU_OMP_THREADS_BIND": "0",
        "OMP_NUM_THREADS": "1",
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "WARNING"),
        "HF_HUB_OFFLINE": "1",
    }
    process = subprocess.run(command, env=environment, capture_output=True, text=True)
    results = [line for line in process.stdout.splitlines() if line.startswith(_RESULT)]
    if process.returncode or not results:
        sys.exit(f"the engine failed:\n{process.stdout[-4000:]}\n{process.stderr[-4000:]}")
    return json.loads(results[-1].removeprefix(_RESULT))


def print_table(truth: list[dict], served: list[dict]) -> None:
    print(f"\n{'request':<10}{'pass':<18}{'prompt':>7}{'hit':>6}    {'from':<16}{'TTFT':>8}   {'without kvtier':>14}")
    for row in served:
        plain = min(each["ttft"] for each in truth if each["prompt"] == row["prompt"])  # of two passes
        print(
            f"prompt {row['prompt']:<3}{row['pass']:<18}{row['tokens']:>7}{row['hit']:>6}    {row['from']:<16}"
            f"{row['ttft'] * 1e3:>5.0f} ms   {plain * 1e3:>11.0f} ms"
        )


def judge(truth: list[dict], served: list[dict], seconds: float) -> int:
    """The exit status: 1 if a token differs from what vLLM says without kvtier."""
    largest = 0.0
    for row in served:
        plain = next(each for each in truth if each["prompt"] == row["prompt"])
        if row["answer"] != plain["answer"]:
            print(f"\nFAILED: prompt {row['prompt']} in pass {row['pass']} is answered differently with kvtier")
            return 1
        largest = max([largest, *(abs(a - b) for a, b in zip(row["logprobs"], plain["logprobs"], strict=True))])
    if not all(any(row["from"].startswith(tier) for row in served) for tier in ("cpu", "disk")):
        print("\nFAILED: nothing came from cpu, or nothing from disk")
        return 1
    print(f"\nsame {len(served)} answers of {ANSWER} tokens; largest difference of log-probabilities: {largest:.2g}")
    print(f"(splitting a prompt elsewhere changes the order of additions, hence not exactly 0)  {seconds:.0f} s in all")
    return 0


# -- in the process of an engine -------------------------------------------------------------------------


def serve(model: str, config: str, passes: list[str]) -> None:
    from vllm import LLM
    from vllm.config import KVTransferConfig

    transfer = KVTransferConfig(
        kv_connector="KVTierConnector",
        kv_role="kv_both",
        kv_load_failure_policy="recompute",
        kv_connector_extra_config={"kvtier.config": config},
    )
    with contextlib.redirect_stdout(io.StringIO()):
        llm = LLM(
            model,
            dtype="float32",
            enforce_eager=True,
            skip_tokenizer_init=True,
            max_model_len=1024,
            enable_prefix_caching=False,  # else vLLM itself would remember within a process
            kv_transfer_config=transfer if config else None,
        )
    beginning = tokens(seed=0, count=SHARED)
    prompts = [beginning + tokens(seed=1 + i, count=OWN) for i in range(2)]
    ask(llm, tokens(seed=99, count=len(prompts[0])))  # the first request of an engine pays for all that is lazy
    rows = []
    for name in passes:
        for number, prompt in enumerate(prompts):
            with hits() as hit:
                answer = ask(llm, prompt)
            rows.append({"prompt": number, "pass": name, "tokens": len(prompt), **answer, **hit})
    llm.llm_engine.engine_core.shutdown()
    print(_RESULT + json.dumps(rows))


def tokens(seed: int, count: int) -> list[int]:
    drawn = random.Random(seed)
    return [drawn.randrange(10, 2000) for _ in range(count)]


def ask(llm, prompt: list[int]) -> dict:
    """The answer, its log-probabilities, and the seconds to its first token."""
    from vllm import SamplingParams

    engine = llm.llm_engine
    sampling = SamplingParams(temperature=0, max_tokens=ANSWER, logprobs=1, detokenize=False, ignore_eos=True)
    began, first = time.perf_counter(), None
    engine.add_request("1", {"prompt_token_ids": prompt}, sampling)
    while engine.has_unfinished_requests():
        for output in engine.step():
            first = first or time.perf_counter() - began
            last = output.outputs[0]
    logprobs = [step[token].logprob for token, step in zip(last.token_ids, last.logprobs, strict=True)]
    return {"answer": list(last.token_ids), "logprobs": logprobs, "ttft": first}


@contextlib.contextmanager
def hits() -> Iterator[dict]:
    """What kvtier says of the request inside, read from its log line."""
    hit = {"hit": 0, "from": "-"}

    def read(record: logging.LogRecord) -> bool:
        if found := re.search(r"hit (\d+) of \d+ tokens.*?: (.*)", record.getMessage()):
            hit["hit"] = int(found[1])
            hit["from"] = re.sub(r" \d+", "", found[2]) if hit["hit"] else "-"
        return False

    log = logging.getLogger("vllm.kvtier")
    log.setLevel(logging.INFO)
    log.addFilter(read)
    try:
        yield hit
    finally:
        log.removeFilter(read)


if __name__ == "__main__":
    sys.exit(main() if len(sys.argv) == 1 else serve(sys.argv[1], sys.argv[2], sys.argv[3:]))
