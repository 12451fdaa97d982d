"""The engine of `kvtier blend-quality`, in its own process: it reports the distributions after each prompt.

It reads a `Run` as `kvtier_vllm.quality.scoring` does. Each prompt has salts of its own, so it is given only what was
stored for it.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
from vllm import SamplingParams

from kvtier_blend.blends import Blends, Offer
from kvtier_blend.connector import KVTierBlendConnector
from kvtier_blend.plan import Plan, Refused, make_plan
from kvtier_blend.quality.prompts import DocumentsPrompt, prompts_of
from kvtier_blend.settings import SALT, SETTINGS, WORD, BlendSettings
from kvtier_core.errors import BackendError
from kvtier_core.types import Event, EventKind
from kvtier_vllm.quality import scoring


@attrs.frozen
class Run:
    """The request to the engine."""

    model: str
    arguments: Sequence[str]  #: vLLM's own
    stack: Mapping[str, Any]  #: the configuration of kvtier
    link: int  #: as in the settings of blending, like ``tails``
    tails: Sequence[float]
    texts: Sequence[str]
    prompts: Mapping[str, int]  #: other arguments of `prompts_of`


class MeasuredBlends(Blends):
    """Blends with a tail that changes from run to run."""

    #: None: there is no tail, and as many tokens as the default one adds are computed at random places instead.
    tail: float | None = None

    def plan_of(self, offer: Offer) -> Plan | Refused:
        """The plan for the chunks of an offer."""
        if self.tail is not None:
            return self._with_tail(offer, self.tail)
        default = BlendSettings(accept_quality="unmeasured").tail
        least, usual = (self._with_tail(offer, tail) for tail in (0.0, default))
        if isinstance(least, Plan) and isinstance(usual, Plan):
            return scatter(least, least.moved - usual.moved, offer.chunks[0].known.digest)
        return usual if isinstance(least, Plan) else least

    def _with_tail(self, offer: Offer, tail: float) -> Plan | Refused:
        settings, size = attrs.evolve(self._settings, tail=tail), self._side.chunk_tokens
        sizes = {"chunk_tokens": size, "block_tokens": self._block_tokens}
        return make_plan(offer.chunks, offer.start, offer.tokens, settings, **sizes)


def scatter(plan: Plan, count: int, seed: bytes) -> Plan:
    """``plan`` with ``count`` more tokens that are computed, at random places."""
    computed = {token for begin, end in plan.runs for token in range(begin, end)}
    moved = [token for token in range(plan.start, plan.end) if token not in computed]
    computed.update(random.Random(seed).sample(moved, count))
    begins = sorted(token for token in computed if token - 1 not in computed)
    ends = sorted(token + 1 for token in computed if token + 1 not in computed)
    return attrs.evolve(plan, runs=tuple(zip(begins, ends, strict=True)))


class MeasuredConnector(KVTierBlendConnector):
    """`KVTierBlendConnector` with `MeasuredBlends`."""

    blends = MeasuredBlends

    def choose(self, tail: float | None) -> None:
        """Blend the next requests with this `MeasuredBlends.tail`."""
        assert isinstance(self._blends, MeasuredBlends)
        self._blends.tail = tail


def score(run: Run) -> dict[str, Any]:
    """Start an engine and ask it. Exits if kvtier does not serve it; raises BackendError if a prompt is not blended."""
    engine = _Engine(run)
    encode, begin = scoring.tokenizer_of(engine.llm)
    prompts = prompts_of(run.texts, encode, begin, **run.prompts)
    runs: list[dict[str, Any]] = [{"moved": 0, "answers": []} for _ in range(2 + len(run.tails) + 1)]
    for first in range(0, len(prompts), scoring.AT_ONCE):
        group = prompts[first : first + scoring.AT_ONCE]
        salts = [str(first + number) for number in range(len(group))]
        found = [engine.ask(group, salts), engine.ask(group, salts)]  # computed, and again
        engine.store([prompt.earlier for prompt in group], [f"{salt} earlier" for salt in salts])
        found += [engine.ask_blended(group, [f"{salt} earlier" for salt in salts], tail) for tail in (*run.tails, None)]
        for told, (answers, moved) in zip(runs, found, strict=True):
            told["answers"] += answers
            told["moved"] += moved
    told = scoring.result(engine.side, prompts, [])
    engine.llm.llm_engine.engine_core.shutdown()
    return {**told, "runs": runs}


#: For each prompt, what `kvtier_vllm.quality.scoring.ask` returns, and the moved tokens of all.
_Answers = tuple[list[dict[str, Any]], int]


class _Engine:
    def __init__(self, run: Run):
        blend = {"accept_quality": "unmeasured", "link": run.link, "min_tokens": 0}
        self.llm, self.side = scoring.start(
            run.model,
            run.arguments,
            MeasuredConnector.__name__,
            kv_connector_module_path=__name__ if __name__ != "__main__" else __spec__.name,
            kv_role="kv_both",
            extra={**run.stack, SETTINGS: blend},
        )
        self._connector = self.llm.llm_engine.engine_core.engine_core.scheduler.connector
        self._moved: Counter[str] = Counter()  # tokens of each request that was blended
        self.side.events.listeners.append(self._note)

    def _note(self, events: Sequence[Event]) -> None:
        for event in events:
            if event.kind is EventKind.BLENDED:
                self._moved[event.request] += event.tokens

    def store(self, prompts: Sequence[Sequence[int]], salts: Sequence[str]) -> None:
        asked = [
            {"prompt_token_ids": list(tokens), "cache_salt": salt} for tokens, salt in zip(prompts, salts, strict=True)
        ]
        self.llm.generate(asked, SamplingParams(temperature=0, max_tokens=1, detokenize=False), use_tqdm=False)
        self.side.drain(scoring.PATIENCE)

    def ask(self, prompts: Sequence[DocumentsPrompt], salts: Sequence[str], **extra: Any) -> _Answers:
        self._moved.clear()
        answers = scoring.ask(self.llm, prompts, [{"cache_salt": salt} for salt in salts], **extra)
        self.side.drain(scoring.PATIENCE)
        return answers, self._moved.total()

    def ask_blended(self, prompts: Sequence[DocumentsPrompt], salts: Sequence[str], tail: float | None) -> _Answers:
        self._connector.choose(tail)
        found = self.ask(prompts, [SALT + salt for salt in salts], kv_transfer_params={WORD: True})
        if len(+self._moved) != len(prompts):
            why = f"{len(+self._moved)} of {len(prompts)} prompts were blended; the engine's log says why"
            raise BackendError(f"nothing was measured: {why}")
        return found


if __name__ == "__main__":
    scoring.serve(lambda asked: score(Run(**asked)))
