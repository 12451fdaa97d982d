"""Retrieval with a trained model: passages in the order of the retriever, and in the order of `POST /arrange`.

One engine on one `kvtier serve` gets each prompt in both orders. Each order has a `cache_salt` of its own, so that
neither finds the chunks of the other.

    .venv/bin/python examples/arrange.py
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx

PAGE = Path(__file__).parents[1] / "docs" / "serve.md"
INSTRUCTION = "Answer from the passages, in one sentence."
QUESTIONS = (
    "How does a client prove on a socket or at an address that it may ask the server?",
    "Which calls does the server answer for operators on the command line?",
    "What can change when the server reads its files again?",
    "What does the memory of the server keep when the server is killed?",
    "How much memory may a tenant or a model have on the server?",
    "What happens to engines when the server is replaced?",
    "Which token does an operator need to erase the chunks of a tenant?",
    "How does an engine find the socket of the server?",
)
#: Passages in a prompt, and the most characters of a passage.
FOUND, LONGEST = 4, 1000
ORDERS = ("retrieved", "arranged")


def main() -> int:
    """Print the cached tokens and the time to the first token of each prompt. Returns 1 if arranging lost tokens."""
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    import demo_engine
    import real_model

    passages = [each[:LONGEST] for each in re.split(r"\n(?=##+ )", PAGE.read_text())]
    with tempfile.TemporaryDirectory(prefix="kvtier-") as folder, serving(Path(folder)) as server:
        stack = {"version": 1, "server": f"unix:{folder}/kvtier.sock", "chunk_tokens": 128, "load": "always"}
        llm = demo_engine.start(str(real_model.checkpoint()), stack)
        ask(llm, random.Random(0).choices(range(10, 2000), k=500), "first")  # warm up
        print("".join(f"{each:>12}: cached tokens, first token after" for each in ORDERS))
        rows = []
        for question in QUESTIONS:
            before, documents, after = parts(llm, question, retrieved(question, passages))
            row = []
            for salt in ORDERS:
                began = time.perf_counter()
                if salt == "arranged":
                    documents = arranged(server, salt, before=before, documents=documents, after=after)
                cached = ask(llm, [*before, *itertools.chain(*documents), *after], salt)
                row.append((cached, time.perf_counter() - began))
            rows.append(row)
            show(row, question)
        totals = [tuple(map(sum, zip(*column, strict=True))) for column in zip(*rows, strict=True)]
        show(totals, "total")
        llm.llm_engine.engine_core.shutdown()
    return int(totals[1][0] < totals[0][0])


def show(row: Sequence[tuple[int, float]], label: str) -> None:
    """Print the tokens and seconds of each order."""
    print("".join(f"{cached:>27,}{seconds:>17.2f} s" for cached, seconds in row), "", label, flush=True)


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[httpx.Client]:
    """Run `kvtier serve` with its socket in this folder. Yields a client of its operators' socket."""
    file, path = folder / "kvtier.yaml", folder / "kvtier.sock"
    file.write_text("{version: 1, tiers: [{type: cpu, capacity: 1GiB}]}")
    command = [Path(sys.executable).with_name("kvtier"), "serve", "--config", file, "--socket", path]
    operators = folder / "kvtier.sock.http"
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            while not operators.exists():
                if process.poll() is not None:
                    sys.exit("the server has ended; `kvtier serve --check` says why")
                time.sleep(0.05)
            with httpx.Client(base_url="http://kvtier", transport=httpx.HTTPTransport(uds=str(operators))) as client:
                yield client
        finally:
            process.terminate()


def retrieved(question: str, passages: Sequence[str]) -> list[str]:
    """The passages that share the most words with the question, the best one first."""
    wanted = set(re.findall(r"\w{3,}", question.lower()))
    return sorted(passages, key=lambda each: -len(wanted & set(re.findall(r"\w{3,}", each.lower()))))[:FOUND]


def parts(llm: Any, question: str, documents: Sequence[str]) -> tuple[list[int], list[list[int]], list[int]]:
    """The token ids before the documents, those of each document, and those after them."""
    tokenizer = llm.get_tokenizer()
    messages = [{"role": "system", "content": INSTRUCTION}, {"role": "user", "content": f"\0Question: {question}"}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    before, _, after = text.partition("\0")
    texts = [before, *(f"{each}\n\n" for each in documents), after]
    tokens = [tokenizer.encode(each, add_special_tokens=False) for each in texts]
    return tokens[0], tokens[1:-1], tokens[-1]


def arranged(server: httpx.Client, salt: str, **prompt: Any) -> list[list[int]]:
    """The documents in the order with the longest cached prefix."""
    answer = server.post("/arrange", json={**prompt, "cache_salt": salt}).raise_for_status().json()
    return [prompt["documents"][position] for position in answer["best"]["documents"]]


def ask(llm: Any, prompt: list[int], salt: str) -> int:
    """Generate one token. Returns the number of cached tokens of the prompt."""
    from vllm import SamplingParams

    asked = {"prompt_token_ids": prompt, "cache_salt": salt}
    (answer,) = llm.generate([asked], SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)
    return answer.num_cached_tokens or 0


if __name__ == "__main__":
    sys.exit(main())
