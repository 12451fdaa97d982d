"""A process of the demo: engines that answer questions about a document, one after the other."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import random
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

DOCUMENT = Path(__file__).with_name("document.md")
INSTRUCTION = "You answer questions about a document, briefly and in plain words. The document:\n\n"
QUESTIONS = ("What does an LLM engine forget?", "Summarize the document in two sentences.")
ANSWER = 32  # tokens at most

#: What comes before the answers, which are one line of JSON.
RESULT = "RESULT "


@attrs.frozen
class Answer:
    """The answer of an engine, and the seconds that it took."""

    question: int  #: its number
    prompt: int  #: tokens
    reused: int  #: tokens of the prompt that were not computed
    sources: dict[str, int]  #: how many of these came from which tier of kvtier
    seconds: float  #: to the first token
    tokens: list[int]
    logprobs: list[float]  #: of these tokens
    text: str
    complete: bool  #: the model had no more to say


def serve(model: str, store: str, engines: list[dict[str, Any]]) -> None:
    """Does what `demo.run_engines` asks for, and prints each engine's answers, as one line of JSON."""
    print(RESULT + json.dumps([run(model, store, **each) for each in engines]))


def run(model: str, store: str, kvtier: bool, lists: list[list[int]]) -> list[dict[str, Any]]:
    """One engine's answers, as JSON. Before each list but the first vLLM's own prefix cache is emptied."""
    with tempfile.TemporaryDirectory(prefix="kvtier-demo-") as events:
        llm = start(model, stack(store, events) if kvtier else None)
        document = DOCUMENT.read_text()
        ask(llm, 0, random.Random(0).choices(range(10, 2000), k=500))  # a first request pays for all that is lazy
        answers = {}
        for number, questions in enumerate(lists):
            if number:
                llm.reset_prefix_cache()
            for question in questions:
                request_id, answer = ask(llm, question, chat(llm, document, QUESTIONS[question]))
                answers[request_id] = answer
        llm.llm_engine.engine_core.shutdown()  # what is on its way to the disk arrives there; all events are written
        for request_id, tier, tokens in hits(Path(events)):
            if request_id in answers:
                answers[request_id].sources[tier] = tokens
    return [attrs.asdict(answer) for answer in answers.values()]


def stack(store: str, events: str) -> dict[str, Any]:
    """Memory above a disk, and an observer that writes what happens to a file of this folder."""
    return {
        "version": 1,
        "load_wait": "60s",  # a demo must not give up on a slow machine
        "tiers": [
            {"type": "cpu", "capacity": "512MiB"},
            {"type": "disk", "path": store, "capacity": "1GiB", "min_free": "64MiB"},
        ],
        "observers": [{"type": "jsonl", "path": events}],
    }


def hits(events: Path) -> list[tuple[str, str, int]]:
    """The hits of requests: the id of one, a tier, and the tokens that came from there."""
    lines = [json.loads(line) for file in events.iterdir() for line in file.read_text().splitlines()]
    # vLLM appends to the id that a request was given.
    return [
        (each["request"].partition("-")[0], each["tier"], each["tokens"]) for each in lines if each["event"] == "hit"
    ]


def start(model: str, config: Mapping[str, Any] | None) -> Any:
    """Returns a vLLM with this checkpoint, and with kvtier if there is a configuration of it."""
    from vllm import LLM
    from vllm.config import KVTransferConfig

    transfer = KVTransferConfig(
        kv_connector="KVTierConnector",
        kv_role="kv_both",
        kv_load_failure_policy="recompute",
        kv_connector_extra_config=dict(config or {}),
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


_ids = itertools.count()


def ask(llm: Any, question: int, prompt: list[int]) -> tuple[str, Answer]:
    """Puts a prompt to the engine, which has no other to serve, and waits for all of its answer.

    Returns the id of the request, and the answer, without the tiers that tokens came from.
    """
    from vllm import SamplingParams

    engine = llm.llm_engine
    sampling = SamplingParams(temperature=0, max_tokens=ANSWER, logprobs=0)
    began, first = time.perf_counter(), None
    request_id = str(next(_ids))
    engine.add_request(request_id, {"prompt_token_ids": prompt}, sampling)
    while engine.has_unfinished_requests():
        for output in engine.step():
            first = first or time.perf_counter() - began
            last = output
    said = last.outputs[0]
    return request_id, Answer(
        question=question,
        prompt=len(prompt),
        reused=last.num_cached_tokens or 0,
        sources={},
        seconds=first,
        tokens=list(said.token_ids),
        logprobs=[step[token].logprob for token, step in zip(said.token_ids, said.logprobs, strict=True)],
        text=said.text,
        complete=said.finish_reason == "stop",
    )


if __name__ == "__main__":
    serve(*json.loads(sys.argv[1]))
