"""The common parts of `simulate` and `plan`: options for a trace, the KV of a token, and speeds."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator

from kvtier_core.config.model import StackConfig
from kvtier_core.errors import ConfigError, Problem
from kvtier_core.types import Nbytes, Seconds, size
from kvtier_simulate.costs import Speed
from kvtier_simulate.study import ARENA_SPEED, TIER_SPEED, Study, layout_of
from kvtier_simulate.traces import CHUNK_TOKENS, read_trace

_TOKEN = "128KiB"


def add_to(parser: argparse.ArgumentParser) -> None:
    """Add the options that both commands have."""
    parser.add_argument("trace", help="a file of JSON lines, as Mooncake publishes them and kvtier records them")
    parser.add_argument(
        "--chunk-tokens", type=int, help=f"tokens per id, if the trace does not say; default: {CHUNK_TOKENS}"
    )
    parser.add_argument(
        "--bytes-per-token", default=_TOKEN, help=f"KV per token; default: {_TOKEN}, that of Llama 3.1 8B in 16 bits"
    )
    parser.add_argument(
        "--packing",
        choices=("auto", "off"),
        default="off",
        help="packing of the arena, for KV in bfloat16; a file states its own; default: off",
    )
    parser.add_argument(
        "--writes", help="bytes a day that may be written to each store tier: 2TiB; a file states its own; default: any"
    )
    parser.add_argument(
        "--prefill", type=float, default=8000.0, help="speed of prefill, in tokens a second; default: 8000"
    )
    parser.add_argument(
        "--speed",
        action="append",
        default=[],
        metavar="TIER=GB/s[,LATENCY]",
        help=f"speed of reading from a tier: disk=7,100us; default: {ARENA_SPEED.gigabytes:g} from an arena, "
        f"{TIER_SPEED.gigabytes:g} from a tier below",
    )


def read(options: argparse.Namespace, wanted: int = 1) -> Study:
    """The study that the options ask for, in chunks of ``wanted`` tokens if those are a multiple of the trace's.

    Raises ConfigError.
    """
    if options.chunk_tokens is not None and options.chunk_tokens < 1:
        raise _wrong("--chunk-tokens", str(options.chunk_tokens), "must be positive")
    trace = read_trace(options.trace, options.chunk_tokens).in_chunks_of(wanted)
    try:
        token = Nbytes.parse(options.bytes_per_token)
    except ValueError as error:
        raise _wrong("--bytes-per-token", options.bytes_per_token, str(error)) from error
    if not token:
        raise _wrong("--bytes-per-token", options.bytes_per_token, "must be positive")
    if not options.prefill > 0:
        raise _wrong("--prefill", f"{options.prefill:g}", "must be positive")
    speeds = dict(_read_speed(text) for text in options.speed)
    writes = tuple(_read_writes(text) for text in (options.writes or "").split(",") if options.writes is not None)
    return Study(trace, layout_of(trace.chunk_tokens, token), options.prefill, speeds, options.packing, writes)


def _read_writes(text: str) -> Nbytes:
    try:
        per_day = Nbytes.parse(text)
    except ValueError as error:
        raise _wrong("--writes", text, str(error)) from error
    if not per_day:
        raise _wrong("--writes", text, "must be positive")
    return per_day


def _read_speed(text: str) -> tuple[str, Speed]:
    tier, _, numbers = text.partition("=")
    gigabytes, _, latency = numbers.partition(",")
    try:
        speed = Speed(float(gigabytes), Seconds.parse(latency or "0s"))
    except ValueError as error:
        raise _wrong("--speed", text, str(error), "write it as disk=3 or disk=3,0.1ms") from error
    if not (tier and speed.gigabytes > 0):
        raise _wrong("--speed", text, "it needs a tier and a speed", "write it as disk=3 or disk=3,0.1ms")
    return tier, speed


def check_speeds(study: Study, configs: Iterable[StackConfig]) -> None:
    """Raise ConfigError if a speed was given for a tier that none of the stacks has."""
    names = dict.fromkeys(tier.name for config in configs for tier in config.tiers)
    if strange := next((name for name in study.speeds if name not in names), None):
        raise _wrong("--speed", strange, f"no such tier; tiers: {', '.join(names)}")


def describe(study: Study) -> Iterator[str]:
    """A description of the trace in two lines, and one of what is missing in it."""
    trace, nothing = study.trace, study.nothing()
    minutes = (trace.prompts[-1].at - trace.prompts[0].at) / 60
    yield (
        f"{trace.name}: {len(trace.prompts)} prompts in {minutes:.0f} min, {trace.tokens / len(trace.prompts):.0f} "
        f"tokens each; {trace.distinct} distinct chunks of {trace.chunk_tokens} tokens, "
        f"{size(trace.distinct * study.layout.payload_nbytes)} of KV"
    )
    yield f"without a cache: mean prefill {ms(nothing.mean)}, p95 {ms(nothing.p95)}"
    if trace.dropped:
        yield f"one line was dropped: {trace.dropped} ends before its request does"


def ms(seconds: float) -> str:
    """A time in whole milliseconds, with the unit."""
    return f"{seconds * 1e3:.0f} ms"


def _wrong(option: str, text: str, why: str, hint: str = "") -> ConfigError:
    return ConfigError([Problem(option, text, why, hint)])
