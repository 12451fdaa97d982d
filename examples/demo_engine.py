"""One engine of the demo, in a process of its own: it answers questions about a document, and prints the answers."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import random
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs

DOCUMENT = Path(__file__).parents[1] / "README.md"
INSTRUCTION = "You answer questions about a document, briefly and in plain words. The document:\n\n"
QUESTIONS = ("What does an LLM engine forget?", "Summarize the document in two sentences.")
ANSWER = 32  # tokens at most

#: What comes before the answers, which are one line of JSON.
RESULT = "RESULT "


@attrs.frozen
class Answer:
    """What an engine answered, and how long that took."""

    question: int  #: its number
    prompt: int  #: tokens
    reused: int  #: tokens of the prompt that were not computed
    sources: dict[str, int]  #: how many of these came from which tier of kvtier
    seconds: float  #: to the first token
    tokens: list[int]
    logprobs: list[float]  #: of these tokens
    text: str
    complete: bool  #: the model had no more to say


def serve(model: str, config: str, lists: list[list[int]]) -> None:
    """Does what `demo.run_engine` asks for, and prints the answers as one line of JSON."""
    llm = start(model, config)
    document = DOCUMENT.read_text()
    ask(llm, 0, random.Random(0).choices(range(10, 2000), k=500))  # an engine's first request pays for all that is lazy
    answers = []
    for number, questions in enumerate(lists):
        if number:
            llm.reset_prefix_cache()
        for question in questions:
            answers.append(ask(llm, question, chat(llm, document, QUESTIONS[question])))
    llm.llm_engine.engine_core.shutdown()  # what is on its way to the disk arrives there
    print(RESULT + json.dumps([attrs.asdict(each) for each in answers]))


def start(model: str, config: str) -> Any:
    """Returns a vLLM with this checkpoint, and with kvtier if there is a config."""
    from vllm import LLM
    from vllm.config import KVTransferConfig

    transfer = KVTransferConfig(
        kv_connector="KVTierConnector",
        kv_role="kv_both",
        kv_load_failure_policy="recompute",
        kv_connector_extra_config={"kvtier.config": config},
    )
    with contextlib.redirect_stdout(io.StringIO()):
        return LLM(
            model,
            dtype="float32",  # demo.py says why
            enforce_eager=True,
            max_model_len=8192,
            max_num_batched_tokens=8192,  # a prompt is computed in one piece
            enable_prefix_caching=not config,  # with kvtier, what is remembered is what kvtier remembers
            kv_transfer_config=transfer if config else None,
        )


def chat(llm: Any, document: str, question: str) -> list[int]:
    """Returns the tokens of a prompt: document, then question, in the chat template of the model."""
    messages = [{"role": "system", "content": INSTRUCTION + document}, {"role": "user", "content": question}]
    return llm.get_tokenizer().apply_chat_template(messages, add_generation_prompt=True, return_dict=False)


def ask(llm: Any, question: int, prompt: list[int]) -> Answer:
    """Puts a prompt to the engine, which has no other to serve, and waits for all of its answer."""
    from vllm import SamplingParams

    engine = llm.llm_engine
    sampling = SamplingParams(temperature=0, max_tokens=ANSWER, logprobs=0)
    began, first = time.perf_counter(), None
    with hits() as sources:
        engine.add_request("1", {"prompt_token_ids": prompt}, sampling)
        while engine.has_unfinished_requests():
            for output in engine.step():
                first = first or time.perf_counter() - began
                last = output
    said = last.outputs[0]
    return Answer(
        question=question,
        prompt=len(prompt),
        reused=last.num_cached_tokens or 0,
        sources=sources,
        seconds=first,
        tokens=list(said.token_ids),
        logprobs=[step[token].logprob for token, step in zip(said.token_ids, said.logprobs, strict=True)],
        text=said.text,
        complete=said.finish_reason == "stop",
    )


@contextlib.contextmanager
def hits() -> Iterator[dict[str, int]]:
    """Yields how many tokens of the request inside came from which tier: filled in from kvtier's log line."""
    sources: dict[str, int] = {}

    def read(record: logging.LogRecord) -> bool:
        if found := re.search(r"hit [1-9]\d* of \d+ tokens.*?: (.*)", record.getMessage()):
            sources.update((tier, int(tokens)) for tier, tokens in re.findall(r"(\w+) (\d+)", found[1]))
        return False

    log = logging.getLogger("vllm.kvtier")
    log.setLevel(logging.INFO)
    log.addFilter(read)
    try:
        yield sources
    finally:
        log.removeFilter(read)


if __name__ == "__main__":
    serve(*json.loads(sys.argv[1]))
