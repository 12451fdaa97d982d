"""Real vLLM engines side by side, each in a process of its own: vLLM keeps one connector per process.

An engine without a request is idle, so the engines can be asked one after the other.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import attrs

from benchmarks.measure import progress, sized

BLOCK = 128
_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # For all alike: on its own, vLLM binds more cores if there is a connector, and everything looks faster with one.
    "VLLM_CPU_OMP_THREADS_BIND": "0",
    "OMP_NUM_THREADS": "1",  # vLLM binds nothing in an engine of one process, and threads that wait for each other spin
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
}
_OPTIONS = {
    "dtype": "bfloat16",
    "enforce_eager": True,
    "skip_tokenizer_init": True,
    "max_model_len": 4096,
    "max_num_batched_tokens": 4096,
    "block_size": BLOCK,
    "kv_cache_memory_bytes": sized(1 << 30, 128 << 20),
    "enable_prefix_caching": False,
    "seed": 0,
}


@attrs.frozen
class Recipe:
    name: str
    transfer: dict[str, Any] | None = None  #: of KVTransferConfig
    options: dict[str, Any] = attrs.field(factory=dict)  #: of LLM
    prepare: Callable[[], None] | None = None  #: called in the process of the engine, before it starts


@attrs.frozen
class Answer:
    first: float  #: seconds until the first token of any prompt
    seconds: float
    cached: int  #: prompt tokens that were not computed
    settling: float  #: seconds for which stores continued afterwards; the benchmark waited for them


class Engine:
    """A process that runs an LLM, and the pipe to it."""

    def __init__(self, recipe: Recipe, model: Path, process: BaseProcess, pipe: Connection):
        self.name = recipe.name
        self._process = process
        self._pipe = pipe
        pipe.send((recipe, model))

    def wait(self) -> None:
        self._pipe.recv()

    def ask(self, prompts: Sequence[Sequence[int]], tokens: int, *, settle: bool = True) -> Answer:
        """Not ``settle``: stores may continue when it returns, or hang."""
        self._pipe.send((prompts, tokens, settle))
        return self._pipe.recv()

    def close(self) -> None:
        self._pipe.close()
        self._process.join(30)
        self._process.kill()


@contextlib.contextmanager
def engines(recipes: Sequence[Recipe], model: Path) -> Iterator[list[Engine]]:
    """Starts an engine for each recipe, all with this checkpoint, and stops them when the context ends."""
    progress(f"starting {len(recipes)} engines: {', '.join(recipe.name for recipe in recipes)}")
    os.environ.update(_ENVIRONMENT)  # read by vLLM when it is imported
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(["vllm.entrypoints.llm", "vllm.v1.worker.cpu_worker"])  # most of the start, once
    with contextlib.ExitStack() as stack:
        started = []
        for recipe in recipes:
            ours, theirs = server.Pipe()
            process = server.Process(target=_serve, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            started.append(Engine(recipe, model, process, ours))
            stack.callback(started[-1].close)
        for engine in started:
            engine.wait()
        yield started


def none(name: str = "no connector") -> Recipe:
    return Recipe(name)


def prefix_cache() -> Recipe:
    return Recipe("vLLM's own prefix cache", options={"enable_prefix_caching": True})


def example(folder: Path) -> Recipe:
    transfer = {"kv_connector": "ExampleConnector", "kv_connector_extra_config": {"shared_storage_path": str(folder)}}
    return Recipe("vLLM's ExampleConnector", {**transfer, "kv_role": "kv_both"})


def idle() -> Recipe:
    module = "benchmarks.idle_connector"
    transfer = {"kv_connector": "IdleConnector", "kv_connector_module_path": module, "kv_role": "kv_both"}
    return Recipe("a connector that does nothing", transfer)


def kvtier(name: str, chunk_tokens: int, *tiers: dict[str, Any], server: Path | None = None, **more: Any) -> Recipe:
    """With tiers of its own, or those of the server at this socket, and more settings."""
    where = {"server": f"unix:{server}"} if server else {"tiers": list(tiers)}
    transfer = {
        "kv_connector": "KVTierConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"version": 1, "chunk_tokens": chunk_tokens, **where, **more},
    }
    return Recipe(name, transfer)


def prompt(seed: object, tokens: int) -> list[int]:
    return random.Random(str(seed)).choices(range(10, 2000), k=tokens)


# -- in the engine's process -----------------------------------------------------------------------------


def _serve(pipe: Connection) -> None:
    os.dup2(2, 1)  # stdout is for the tables
    recipe, model = pipe.recv()
    llm = _start(recipe, model)
    pipe.send("ready")
    with contextlib.suppress(EOFError):
        while True:
            pipe.send(_ask(llm, *pipe.recv()))
    llm.llm_engine.engine_core.shutdown()


def _start(recipe: Recipe, model: Path) -> Any:
    from vllm import LLM
    from vllm.config import KVTransferConfig

    if recipe.prepare:
        recipe.prepare()
    transfer = recipe.transfer and KVTransferConfig(**recipe.transfer)
    return LLM(str(model), **{**_OPTIONS, **recipe.options}, kv_transfer_config=transfer)


def _ask(llm: Any, prompts: Sequence[Sequence[int]], tokens: int, settle: bool) -> Answer:
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=tokens, detokenize=False, ignore_eos=True)
    engine, first, cached = llm.llm_engine, 0.0, 0
    begin = time.perf_counter()
    for number, each in enumerate(prompts):
        engine.add_request(str(number), {"prompt_token_ids": each}, sampling)
    while engine.has_unfinished_requests():
        outputs = engine.step()
        for output in outputs:
            first = first or time.perf_counter() - begin
            cached += (output.num_cached_tokens or 0) if output.finished else 0
        if not outputs:
            time.sleep(0.001)  # as a server does after a step that computed nothing: threads that load get the GIL
    seconds = time.perf_counter() - begin
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    while settle and scheduler.has_requests():  # like a server, which keeps stepping while stores are under way
        engine.step()
        time.sleep(0.001)
    return Answer(first, seconds, cached, time.perf_counter() - begin - seconds)
