"""One run of `kvtier quality`, in its own process: an engine reports the distributions after each prompt.

It reads a `Run` as JSON from its standard input, and writes the answers to the file that is named there as ``into``.

The tokens of a continuation are forced one by one, so that all runs give distributions at the same places. vLLM takes
log-probabilities before that (``logprobs_mode: raw_logprobs``).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
from vllm import LLM, SamplingParams
from vllm.config import KVTransferConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

from kvtier_core.engine.scheduler.side import SchedulerSide
from kvtier_core.errors import BackendError
from kvtier_vllm.quality.prompts import Encode, Prompt, prompts_of

#: Log-probabilities for each place. vLLM gives no more unless it is asked for more at its start.
TOP = 20
#: Number of prompts at a time. More would need an arena for the KV of all of them.
AT_ONCE = 8
#: Seconds for what a group of prompts stores to arrive below.
PATIENCE = 600.0
_FORCED = "kvtier_forced"


@attrs.frozen
class Run:
    """The request to one engine."""

    model: str
    arguments: Sequence[str]  #: vLLM's own
    role: str  #: ``kv_producer`` computes and stores everything, ``kv_consumer`` computes only what it does not find
    stack: Mapping[str, Any]  #: the configuration of kvtier
    texts: Sequence[str]
    tokens: int  #: of a prompt
    follow: int  #: of a continuation


class Forced(AdapterLogitsProcessor):
    """Lets a request generate only its continuation."""

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> Callable | None:
        tokens: Any = (params.extra_args or {}).get(_FORCED)

        def force(said: Sequence[int], logits: Any) -> Any:
            kept = logits[tokens[len(said)]].clone()
            logits.fill_(float("-inf"))
            logits[tokens[len(said)]] = kept
            return logits

        return force if tokens else None


def serve(answer: Callable[[Mapping[str, Any]], Mapping[str, Any]]) -> None:
    """Answer the JSON of the standard input into the file that it names."""
    asked = json.load(sys.stdin)
    into = Path(asked.pop("into"))
    try:
        into.write_text(json.dumps(answer(asked)), "ascii")
    except BackendError as error:
        sys.exit(str(error))


def score(run: Run) -> dict[str, Any]:
    """Start an engine and ask it. Exits if kvtier does not serve it."""
    llm, side = start(run.model, run.arguments, "KVTierConnector", kv_role=run.role, extra=run.stack)
    prompts = prompts_of(run.texts, *tokenizer_of(llm), run.tokens, run.follow)
    answers = []
    for first in range(0, len(prompts), AT_ONCE):
        group = prompts[first : first + AT_ONCE]
        answers += ask(llm, group, [{} for _ in group])
        side.drain(PATIENCE)
    found = result(side, prompts, answers)
    llm.llm_engine.engine_core.shutdown()
    return found


def start(
    model: str, arguments: Sequence[str], connector: str, *, extra: Mapping[str, Any], **transfer: Any
) -> tuple[LLM, SchedulerSide]:
    """An engine with vLLM's own ``arguments``, and its scheduler side. Exits if kvtier does not serve it.

    ``extra`` is the configuration of kvtier; ``transfer`` are other settings of vLLM's KVTransferConfig.
    """
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser(prog="vllm"))
    made = EngineArgs.from_cli_args(parser.parse_args(["--model", model, *arguments]))
    made.enable_prefix_caching = False  # what is found is what kvtier finds
    made.logits_processors = [f"{__name__ if __name__ != '__main__' else __spec__.name}:{Forced.__name__}"]
    made.kv_transfer_config = KVTransferConfig(
        kv_connector=connector,
        kv_load_failure_policy="fail",  # what is computed instead would look exact
        kv_connector_extra_config=dict(extra),
        **transfer,
    )
    llm = LLM.from_engine_args(made)
    side = llm.llm_engine.engine_core.engine_core.scheduler.connector.side
    if not isinstance(side, SchedulerSide):
        sys.exit("kvtier does not serve this engine; its log says why")
    return llm, side


def tokenizer_of(llm: LLM) -> tuple[Encode, list[int]]:
    """What turns text into tokens and adds none, and the tokens that the model wants at the beginning of prompts."""
    tokenizer = llm.get_tokenizer()
    return lambda text: tokenizer.encode(text, add_special_tokens=False), tokenizer.encode("")


def ask(llm: LLM, prompts: Sequence[Prompt], more: Sequence[Mapping[str, Any]], **extra: Any) -> list[dict[str, Any]]:
    """For each prompt, the number of its tokens that kvtier found, and the distributions along its continuation.

    ``more`` has other keys of each prompt for vLLM, and ``extra`` is for the requests' ``extra_args``.
    """
    sampling = [
        SamplingParams(
            temperature=0,
            max_tokens=len(prompt.continuation),
            ignore_eos=True,
            logprobs=TOP,
            detokenize=False,
            extra_args={_FORCED: list(prompt.continuation), **extra},
        )
        for prompt in prompts
    ]
    asked = [{"prompt_token_ids": list(prompt.tokens), **keys} for prompt, keys in zip(prompts, more, strict=True)]
    outputs = llm.generate(asked, sampling, use_tqdm=False)
    return [
        {
            "found": output.num_cached_tokens or 0,
            "places": [_place(*each, prompt) for each in enumerate(output.outputs[0].logprobs)],
        }
        for output, prompt in zip(outputs, prompts, strict=True)
    ]


def result(side: SchedulerSide, prompts: Sequence[Prompt], answers: Sequence[Any]) -> dict[str, Any]:
    """What `kvtier_vllm.quality.command.Scored` reads."""
    return {
        "facts": dict(side.namespace.facts),
        "chunk_tokens": side.chunk_tokens,
        "depths": [prompt.depth for prompt in prompts],
        "prompt_tokens": [len(prompt.tokens) for prompt in prompts],
        "answers": answers,
    }


def _place(number: int, logprobs: Mapping[int, Any], prompt: Prompt) -> dict[str, Any]:
    told = prompt.continuation[number]
    top = {token: each.logprob for token, each in logprobs.items() if each.rank <= TOP}
    return {"top": top, "told": told, "told_logprob": logprobs[told].logprob}


if __name__ == "__main__":
    serve(lambda asked: score(Run(**asked)))
