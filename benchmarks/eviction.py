"""python -m benchmarks.eviction TRACE... [--write]: hit rates of each eviction policy on traces, and the optimum."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import ClassVar, cast

import attrs

from benchmarks.conditions import conditions, heading
from benchmarks.measure import Table, progress
from kvtier_core.config.model import StackConfig
from kvtier_core.config.registry import Registry
from kvtier_core.interfaces import EvictionConfig, EvictionPolicy, SupportsSparing
from kvtier_core.types import Nbytes, size
from kvtier_simulate import stacks
from kvtier_simulate.plot import Curve, Picture
from kvtier_simulate.study import Study, layout_of
from kvtier_simulate.traces import read_trace

CAPACITIES = ("1%", "5%", "10%", "20%")
TWO_TIERS = "1%+10%"
TOKEN_NBYTES = 128 << 10
RESULTS = Path(__file__).with_name("EVICTION.md")
#: From here to its end the file is written by hand, and kept.
BY_HAND = "## Tried, and left out"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.eviction", description="Policies, and the bound.")
    parser.add_argument("traces", nargs="+", type=Path, metavar="TRACE", help="in the format of Mooncake, or recorded")
    parser.add_argument("--write", action="store_true", help=f"also write benchmarks/{RESULTS.name}, and the pictures")
    arguments = parser.parse_args()
    began = conditions()
    printed = []
    for path in arguments.traces:
        trace = read_trace(path)
        study = Study(trace, layout_of(trace.chunk_tokens, TOKEN_NBYTES))
        picture, table = one_tier(study)
        printed += [str(table), str(two_tiers(study))]
        if arguments.write:
            picture.save(RESULTS.with_name(f"eviction-{trace.name}.svg"))
            printed.insert(-1, f"![Hit rate over capacity](eviction-{trace.name}.svg)")
    report = "\n\n".join(printed)
    print(report)
    if arguments.write:
        by_hand = "".join(RESULTS.read_text().partition(f"\n{BY_HAND}")[1:])
        RESULTS.write_text(f"{heading('Eviction', 'python -m benchmarks.eviction', began)}\n\n{report}\n{by_hand}")
        progress(f"wrote {RESULTS}")


def one_tier(study: Study) -> tuple[Picture, Table]:
    sizes = [stacks.read_size(text, study.trace, study.layout) for text in CAPACITIES]
    bound = Curve("optimum", tuple(study.bound(_stack(study, [each], "lru")).hit_rate for each in sizes))
    curves, rows = [], []
    for name in stacks.all_policies(Registry.discover()):
        progress(f"eviction: {study.trace.name}: {name}")
        watch = Stopwatch()
        rates = tuple(study.run(_stack(study, [each], name, watch)).hit_rate for each in sizes)
        curves.append(Curve(name, rates))
        took = watch.seconds / study.trace.accesses / len(sizes)
        rows.append((name, *(f"{rate:.4f}" for rate in rates), f"{took * 1e6:.2f}"))
    rows.sort(key=lambda row: row[1:-1], reverse=True)
    table = Table(
        title=f"{study.trace.name}: one tier",
        says=f"{_about(study)} Hit rates by tokens, at capacities of so much of the distinct chunks, cold at the "
        "start; and the microseconds that the policy itself took for each chunk that was asked for.",
        header=("policy", *CAPACITIES, "µs a chunk"),
        rows=[("*offline optimum*", *(f"{rate:.4f}" for rate in bound.rates), ""), *rows],
    )
    ticks = tuple(zip(CAPACITIES, map(size, sizes), strict=True))
    title, subtitle = "Prefix hit rate over capacity", f"{study.trace.name}: {len(study.trace.prompts):,} prompts"
    axis = "capacity, on a logarithmic scale: the share of all distinct chunks that fit, and bytes"
    return Picture(title, subtitle, axis, tuple(map(float, sizes)), ticks, tuple(curves), bound), table


def two_tiers(study: Study) -> Table:
    sizes = stacks.read_capacities(TWO_TIERS, study.trace, study.layout)
    none, bound = study.nothing(), study.bound(_stack(study, sizes, "lru"))
    rows = []
    for name in stacks.all_policies(Registry.discover()):
        progress(f"eviction: {study.trace.name}: {name} in two tiers")
        tally = study.run(_stack(study, sizes, name))
        saved = (none.mean - tally.mean) / (none.mean - bound.mean)
        written = tally.written["disk"] / study.layout.frame_nbytes / len(study.trace.prompts)
        rows.append((name, f"{tally.mean * 1e3:.0f}", f"{saved:.0%}", f"{tally.p95 * 1e3:.0f}", f"{written:.1f}"))
    rows.sort(key=lambda row: int(row[1]))
    return Table(
        title=f"{study.trace.name}: two tiers, {TWO_TIERS}",
        says=f"Of the distinct chunks. Reading from the upper tier at 20 GB/s, from the lower one at 3 GB/s, "
        f"prefill at {study.prefill:.0f} tokens/s, one after the other; {TOKEN_NBYTES >> 10} KiB of KV a token. Mean "
        "prefill, its share of what can be saved between no cache and the optimum; chunks written to the lower tier.",
        header=("policy in both", "mean ms", "saved", "p95 ms", "written a prompt"),
        rows=[
            ("*no cache*", f"{none.mean * 1e3:.0f}", "0%", f"{none.p95 * 1e3:.0f}", ""),
            ("*offline optimum*", f"{bound.mean * 1e3:.0f}", "100%", f"{bound.p95 * 1e3:.0f}", ""),
            *rows,
        ],
    )


def _about(study: Study) -> str:
    trace = study.trace
    return f"{len(trace.prompts):,} prompts, {trace.accesses:,} chunks of {trace.chunk_tokens} tokens, " + (
        f"{trace.distinct:,} of them distinct."
    )


def _stack(study: Study, sizes: Sequence[Nbytes], name: str, watch: Stopwatch | None = None) -> StackConfig:
    policies = stacks.read_policies(name, len(sizes), Registry.discover())
    if watch is not None:
        policies = tuple(TimedConfig(policy, watch) for policy in policies)
    return stacks.stack_of(sizes, policies, study.trace.chunk_tokens)


@attrs.define
class Stopwatch:
    seconds: float = 0.0


@attrs.frozen
class TimedConfig(EvictionConfig):
    """A policy whose methods are timed by a stopwatch."""

    type: ClassVar[str] = "timed"
    config: EvictionConfig
    watch: Stopwatch

    def open(self) -> EvictionPolicy:
        return cast(EvictionPolicy, Timed(self.config.open(), self.watch))


@EvictionPolicy.register
class Timed:
    """Wraps a policy and times its methods. A wrapper, because those of a C++ policy cannot be replaced."""

    def __init__(self, policy: EvictionPolicy, watch: Stopwatch):
        self.watch = watch
        self.leaf_first = policy.leaf_first
        for name, method in [*vars(EvictionPolicy).items(), *vars(SupportsSparing).items()]:
            if callable(method) and not name.startswith("_") and hasattr(policy, name):
                setattr(self, name, self._timed(getattr(policy, name)))

    def _timed(self, method):
        def timed(*args, **kwargs):
            begin = time.perf_counter()
            answer = method(*args, **kwargs)
            self.watch.seconds += time.perf_counter() - begin
            return self._each(answer) if isinstance(answer, Iterator) else answer

        return timed

    def _each(self, answers: Iterator) -> Iterator:
        while True:
            begin = time.perf_counter()
            answer = next(answers, self)
            self.watch.seconds += time.perf_counter() - begin
            if answer is self:
                return
            yield answer


if __name__ == "__main__":
    main()
