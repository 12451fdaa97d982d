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
_CPU_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # For all alike: on its own, vLLM binds more cores if there is a connector, and everything looks faster with one.
    "VLLM_CPU_OMP_THREADS_BIND": "0",
    "OMP_NUM_THREADS": "1",  # vLLM binds nothing in an engine of one process, and threads that wait for each other spin
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
}
_CPU_OPTIONS = {
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
class Hardware:
    """What engines on it have in common."""

    environment: dict[str, str]
    options: dict[str, Any]  #: of LLM
    preload: Sequence[str] = ()  #: modules that their processes have when they start


CPU = Hardware(_CPU_ENVIRONMENT, _CPU_OPTIONS, ("vllm.entrypoints.llm", "vllm.v1.worker.cpu_worker"))


@attrs.frozen
class Recipe:
    name: str
    transfer: dict[str, Any] | None = None  #: of KVTransferConfig
    options: dict[str, Any] = attrs.field(factory=dict)  #: of LLM
    prepare: Callable[[], None] | None = None  #: called in the process of the engine, before it starts
    environment: dict[str, str] = attrs.field(factory=dict)


@attrs.frozen
class Answer:
    first: float  #: seconds until the first token of any prompt
    seconds: float
    cached: int  #: prompt tokens that were not computed
    settling: float  #: seconds for which stores continued afterwards; the benchmark waited for them
    tokens: Sequence[tuple[int, float]] = ()  #: each with its log-probability, if they were asked for


class Engine:
    """A process that runs an LLM, and the pipe to it."""

    def __init__(self, recipe: Recipe, model: Path, process: BaseProcess, pipe: Connection):
        self.name = recipe.name
        self._process = process
        self._pipe = pipe
        pipe.send((recipe, model))

    def wait(self) -> None:
        self._pipe.recv()

    def ask(
        self, prompts: Sequence[Sequence[int]], tokens: int, *, settle: bool = True, logprobs: bool = False
    ) -> Answer:
        """Not ``settle``: stores may continue when it returns, or hang."""
        return self._call("ask", prompts, tokens, settle, logprobs)

    def reset(self) -> None:
        """Empty the engine's own prefix cache. A connector keeps what it has."""
        self._call("reset")

    def drain(self) -> None:
        """Let all that kvtier writes reach its tiers."""
        self._call("drain")

    def sleep(self) -> None:
        """Put the engine to sleep, with its weights in memory of the host, and wake it up."""
        self._call("sleep")

    def reload(self, checkpoint: Path) -> None:
        """Serve other weights of the same model."""
        self._call("reload", checkpoint)

    def _call(self, name: str, *arguments: Any) -> Any:
        self._pipe.send((name, arguments))
        return self._pipe.recv()

    def close(self) -> None:
        self._pipe.close()
        self._process.join(30)
        self._process.kill()


@contextlib.contextmanager
def engines(recipes: Sequence[Recipe], model: Path, hardware: Hardware = CPU) -> Iterator[list[Engine]]:
    """Starts an engine for each recipe, all with this checkpoint, and stops them when the context ends."""
    progress(f"starting {len(recipes)} engines: {', '.join(recipe.name for recipe in recipes)}")
    os.environ.update(hardware.environment)  # read by vLLM when it is imported
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(list(hardware.preload))  # most of the start, once
    with contextlib.ExitStack() as stack:
        started = []
        for recipe in recipes:
            ours, theirs = server.Pipe()
            process = server.Process(target=_serve, args=(theirs, hardware))
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


def kvtier(
    name: str, chunk_tokens: int | None, *tiers: dict[str, Any], server: Path | None = None, **more: Any
) -> Recipe:
    """With tiers of its own, or those of the server at this socket, and more settings. None: chunks of the default."""
    where = {"server": f"unix:{server}"} if server else {"tiers": list(tiers)}
    chunks = {} if chunk_tokens is None else {"chunk_tokens": chunk_tokens}
    transfer = {
        "kv_connector": "KVTierConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"version": 1, **chunks, **where, **more},
    }
    return Recipe(name, transfer)


def prompt(seed: object, tokens: int) -> list[int]:
    return random.Random(str(seed)).choices(range(10, 2000), k=tokens)


# -- in the engine's process -----------------------------------------------------------------------------


def _serve(pipe: Connection, hardware: Hardware) -> None:
    os.dup2(2, 1)  # stdout is for the tables
    recipe, model = pipe.recv()
    os.environ.update(recipe.environment)
    engine = _Engine(recipe, model, hardware)
    pipe.send("ready")
    with contextlib.suppress(EOFError):
        while True:
            name, arguments = pipe.recv()
            pipe.send(getattr(engine, name)(*arguments))
    engine.close()


class _Engine:
    """What an `Engine` asks for, where the LLM is."""

    def __init__(self, recipe: Recipe, model: Path, hardware: Hardware):
        from vllm import LLM
        from vllm.config import KVTransferConfig

        if recipe.prepare:
            recipe.prepare()
        transfer = recipe.transfer and KVTransferConfig(**recipe.transfer)
        self._llm: Any = LLM(str(model), **{**hardware.options, **recipe.options}, kv_transfer_config=transfer)

    def ask(self, prompts: Sequence[Sequence[int]], tokens: int, settle: bool, logprobs: bool) -> Answer:
        from vllm import SamplingParams

        sampling = SamplingParams(
            temperature=0, max_tokens=tokens, detokenize=False, ignore_eos=True, logprobs=1 if logprobs else None
        )
        engine, first, cached = self._llm.llm_engine, 0.0, 0
        said: list[tuple[int, float]] = []
        begin = time.perf_counter()
        for number, each in enumerate(prompts):
            engine.add_request(str(number), {"prompt_token_ids": each}, sampling)
        while engine.has_unfinished_requests():
            outputs = engine.step()
            for output in outputs:
                first = first or time.perf_counter() - begin
                cached += (output.num_cached_tokens or 0) if output.finished else 0
                if output.finished and logprobs:
                    (answer,) = output.outputs
                    steps = zip(answer.token_ids, answer.logprobs, strict=True)
                    said += [(token, step[token].logprob) for token, step in steps]
            if not outputs:
                time.sleep(0.001)  # as a server does after a step that computed nothing: threads that load get the GIL
        seconds = time.perf_counter() - begin
        while settle and self._stores():  # like a server, which keeps stepping while stores are under way
            engine.step()
            time.sleep(0.001)
        return Answer(first, seconds, cached, time.perf_counter() - begin - seconds, said)

    def _stores(self) -> bool:
        """Not known of an engine whose scheduler is in a process of its own: it steps by itself."""
        core = getattr(self._llm.llm_engine.engine_core, "engine_core", None)
        return core is not None and core.scheduler.has_requests()

    def reset(self) -> None:
        assert self._llm.reset_prefix_cache(), "blocks are in use"

    def drain(self) -> None:
        self._llm.llm_engine.engine_core.engine_core.scheduler.connector.side.drain(timeout=600)

    def sleep(self) -> None:
        self._llm.sleep(level=1)
        self._llm.wake_up()

    def reload(self, checkpoint: Path) -> None:
        self._llm.collective_rpc("reload_weights", kwargs={"weights_path": str(checkpoint)})

    def close(self) -> None:
        self._llm.llm_engine.engine_core.shutdown()
