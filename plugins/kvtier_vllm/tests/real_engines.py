"""Real vLLM engines in this very process, and what their requests must come to."""

from __future__ import annotations

import functools
import gc
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
from patience import HANG

from kvtier_doctor import engines
from kvtier_remote import client

# Read by vLLM when it is imported. What is set already is so on purpose: test_processes sets some.
_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "NUMBA_NUM_THREADS": "1",  # drafts by n-gram run in numba, whose number of threads becomes that of torch
    "VLLM_LOGGING_LEVEL": "INFO",
    "HF_HUB_OFFLINE": "1",
    "TORCHDYNAMO_DISABLE": "1",  # a fact of the namespace: as in the processes of fork_server
}
for _name, _value in _ENVIRONMENT.items():
    os.environ.setdefault(_name, _value)
sys.path.insert(0, str(Path(__file__).parents[3] / "examples"))

BLOCK = 32
CHUNK = 64


@attrs.frozen
class Answer:
    """What an engine said: tokens, the log-probability of each, and how many prompt tokens it had cached."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    cached: int

    def differs(self, other: Answer) -> float:
        """The largest difference of log-probabilities; infinite if the tokens differ."""
        if self.tokens != other.tokens:
            return float("inf")
        return max(abs(a - b) for a, b in zip(self.logprobs, other.logprobs, strict=True))


@attrs.frozen
class Outcome:
    """What became of a request, as `kvtier explain --json` has it."""

    tokens: int
    loaded: int
    engine_had: int
    tiers: Mapping[str, int]
    why: str  #: of a miss; that of a hit is the tiers, and how long it waited
    waited: float = attrs.field(default=0.0, eq=False)  #: seconds

    def assert_own(self, cached: int) -> None:
        """The engine itself had all of its ``cached`` tokens: so its answer is what others are compared with."""
        assert (self.loaded, self.engine_had) == (0, cached) and cached, self

    @classmethod
    def of(cls, told: Mapping[str, Any]) -> Outcome:
        facts = {field.name: told[field.name] for field in attrs.fields(cls)}
        return cls(**facts | {"why": "" if told["loaded"] else told["why"]})


def hit(tokens: int, *, engine_had: int = 0, **tiers: int) -> Outcome:
    """So many tokens of a prompt came from these tiers."""
    return Outcome(tokens, sum(tiers.values()), engine_had, tiers, "")


def miss(tokens: int, why: str = "not stored") -> Outcome:
    """Nothing of a prompt was loaded, and the engine had nothing."""
    return Outcome(tokens, 0, 0, {}, why)


#: More requests than any engine of these tests serves between two looks.
MANY = 4096


def told_by_engines() -> list[list[dict[str, Any]]]:
    """What became of the requests of each engine that has its socket in the runtime folder, for `Outcome.of`."""
    return [engines.ask(path, {"requests": MANY})["found"] for path in engines.found(None)]


class Engine:
    """An LLM in this process, opened up for looking inside."""

    def __init__(
        self,
        model: Path,
        kvtier: dict[str, Any] | None,
        *,
        kv_connector: str = "KVTierConnector",
        kv_role: str = "kv_both",
        kv_load_failure_policy: str = "recompute",
        **options: Any,
    ):
        import torch
        from vllm import LLM
        from vllm.config import KVTransferConfig

        transfer = KVTransferConfig(
            kv_connector=kv_connector,
            kv_role=kv_role,
            kv_load_failure_policy=kv_load_failure_policy,
            kv_connector_extra_config=kvtier or {},
        )
        defaults = {
            "dtype": "float32",
            "enforce_eager": True,
            "skip_tokenizer_init": True,
            "max_model_len": 2048,
            "block_size": BLOCK,
            "enable_prefix_caching": False,
            "kv_cache_memory_bytes": 64 << 20,
            "seed": 0,
        }
        defaults["kv_transfer_config"] = None if kvtier is None else transfer
        assert torch.get_num_threads() == 1, "several add up in any order, and answers are compared to the last bit"
        look_at_models_here()
        self.llm = LLM(str(model), **{**defaults, **options})
        self.parameters: dict[str, Any] | None = None  #: kv_transfer_params of the last answer
        self._known = 0  # requests whose outcome was told before

    @property
    def scheduler(self):
        return self.llm.llm_engine.engine_core.engine_core.scheduler

    @property
    def connector(self):
        """The scheduler's KVTierConnector; the first one of a MultiConnector."""
        from kvtier_vllm.connector import KVTierConnector

        connectors = getattr(self.scheduler.connector, "sub_connectors", [self.scheduler.connector])
        return next(each for each in connectors if isinstance(each, KVTierConnector))

    @property
    def manager(self):
        return self.connector.side.manager

    def ask(self, *prompts: Sequence[int], tokens: int = 4, salt: str | None = None, **options: Any) -> list[Answer]:
        return self.generate(
            *({"prompt_token_ids": list(prompt), **({"cache_salt": salt} if salt else {})} for prompt in prompts),
            tokens=tokens,
            **options,
        )

    def own_hits(self, *prompts: Sequence[int], **options: Any) -> list[Answer]:
        """As `ask`, of prompts that the engine has in its own prefix cache. It is proved that kvtier loads nothing."""
        self.outcomes()
        answers = self.ask(*prompts, **options)
        for answer, outcome in zip(answers, self.outcomes(), strict=True):
            outcome.assert_own(answer.cached)
        return answers

    def generate(
        self, *prompts: dict[str, Any], tokens: int = 4, adapter: Any = None, parameters: Mapping | None = None
    ) -> list[Answer]:
        """Answers to prompts as vLLM takes them, with a LoRARequest or none, and kv_transfer_params or none."""
        from vllm import SamplingParams

        outputs = self.llm.generate(
            list(prompts),
            SamplingParams(
                temperature=0,
                max_tokens=tokens,
                logprobs=1,
                detokenize=False,
                ignore_eos=True,
                extra_args=parameters and {"kv_transfer_params": dict(parameters)},
            ),
            lora_request=adapter,
            use_tqdm=False,
        )
        self.parameters = outputs[-1].kv_transfer_params
        return [
            Answer(
                tuple(output.outputs[0].token_ids),
                tuple(
                    step[token].logprob
                    for token, step in zip(output.outputs[0].token_ids, output.outputs[0].logprobs, strict=True)
                ),
                output.num_cached_tokens or 0,
            )
            for output in outputs
        ]

    def outcomes(self) -> list[Outcome]:
        """What became of each request since this was called last. One whose load failed is there twice."""
        told = self.connector.side.status.recent(MANY)
        assert len(told) < MANY, "the oldest may be forgotten"
        fresh, self._known = told[self._known :], len(told)
        return [Outcome.of(each) for each in fresh]

    def settle(self) -> None:
        """Let everything on its way down arrive. What the last step stored may be reported by the next one."""
        while self.scheduler.has_requests():
            self.llm.llm_engine.step()
        self.connector.side.drain(timeout=HANG)

    def assert_at_rest(self) -> None:
        """Nothing pinned, nothing in flight, no block of the engine lost."""
        self.settle()
        usage = self.manager.usage()
        assert not any(level.pins or level.inflight for level in usage), usage
        side = self.connector.side
        assert not (side._loads or side._stores.jobs or side._requests or self.connector._requests)
        pool = self.scheduler.kv_cache_manager.block_pool
        assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1  # the null block is never free

    def close(self) -> None:
        self.llm.llm_engine.engine_core.shutdown()
        del self.llm
        gc.collect()
        keep_what_engines_share()


#: An engine does without a slot that its server does not name in time. Here all tests of a run share the cores, and it
#: may take long until the server gets one.
PATIENT = functools.partial(client.Waits, others=HANG, silence=HANG)


@functools.cache
def look_at_models_here() -> None:
    """vLLM asks another process, which imports all of it, what each kind of model can do: this one has it imported."""
    from vllm.model_executor.models import registry

    registry._run_in_subprocess = lambda look: look()


@functools.cache
def keep_what_engines_share() -> None:
    """Most of what another engine in this process would cost is looking through all that was imported.

    Its start and its end collect garbage eight times, and replace the same kernels in each of thousands of modules.
    """
    from vllm.platforms import current_platform

    if current_platform.register_triton_kernel_overrides is not None:  # None before vLLM 0.31
        current_platform.register_triton_kernel_overrides()
        type(current_platform).register_triton_kernel_overrides = lambda platform: None
    gc.collect()
    gc.freeze()
    gc.freeze = gc.unfreeze = lambda: None  # vLLM's, which would freeze engines and thaw the modules


def prompt(seed: int, tokens: int, prefix: Sequence[int] = ()) -> list[int]:
    """Random token ids of the tiny model's vocabulary, after a prefix."""
    import random

    drawn = random.Random(seed)
    return [*prefix, *(drawn.randrange(10, 2000) for _ in range(tokens - len(prefix)))]


def cpu(capacity: str = "64MiB", **options: Any) -> dict[str, Any]:
    """A stack that waits a minute for whatever is there, although a tiny model would compute it sooner."""
    settings = {"chunk_tokens": CHUNK, "load": "always", "load_wait": "60s", **options}
    return {"version": 1, **settings, "tiers": [{"type": "cpu", "capacity": capacity}]}


def cpu_and_disk(path: Path, capacity: str = "64MiB", **options: Any) -> dict[str, Any]:
    stack = cpu(capacity, **options)
    stack["tiers"].append({"type": "disk", "path": str(path), "capacity": "1GiB", "min_free": "0B"})
    return stack
