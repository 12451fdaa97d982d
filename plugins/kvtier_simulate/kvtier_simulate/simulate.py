"""`kvtier simulate TRACE`: replays the prompts of a trace through stacks."""

from __future__ import annotations

import argparse
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

import attrs

from kvtier_core.cli.output import FINE, Output, table
from kvtier_core.config.load import load_config
from kvtier_core.config.model import StackConfig, StoreTierConfig
from kvtier_core.config.registry import Registry
from kvtier_core.errors import ConfigError, Problem
from kvtier_core.types import Nbytes, size
from kvtier_simulate import stacks, studies
from kvtier_simulate.bar import Bar
from kvtier_simulate.plot import Curve, Picture, check_name
from kvtier_simulate.replay import Tally
from kvtier_simulate.study import Study

_CAPACITIES = "1%,5%,10%,20%"
#: Not a policy but the offline optimum, after Belady's MIN.
_BOUND = "min"


def add_to(commands: argparse._SubParsersAction) -> None:
    """Add the command and its options."""
    parser = commands.add_parser(
        "simulate",
        help="replay a trace of prompts through stacks, without bytes or an engine",
        description="Replay a trace of prompts, such as an engine records, through the stack of a file or through one "
        "of each capacity and policy, without bytes or an engine, and print the hit rates.",
    )
    studies.add_to(parser)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--config", help="a configuration file with the stack to simulate")
    which.add_argument(
        "--capacity",
        default=_CAPACITIES,
        help="200GiB, or a share of the trace's distinct chunks; 1%%+10%% for two tiers; default: "
        + _CAPACITIES.replace("%", "%%"),
    )
    parser.add_argument(
        "--policy", help=f"lru,gittins …; gittins+lru for two tiers; {_BOUND} for the offline optimum; default: all"
    )
    parser.add_argument(
        "--plot", type=pathlib.Path, metavar="FILE", help="also draw hit rates over capacity, to a .svg or .png"
    )
    parser.set_defaults(run=run)


@attrs.frozen
class Row:
    """One line of the table: a stack, and the result of the trace in it."""

    capacity: str
    policy: str
    config: StackConfig
    tally: Tally
    bound: Tally

    @property
    def per_day(self) -> Nbytes | None:
        """Bytes a day that may be written to its last tier; None: no limit."""
        last = self.config.tiers[-1]
        return last.writes.per_day if isinstance(last, StoreTierConfig) and last.writes else None


def run(options: argparse.Namespace, output: Output) -> int:
    """A line for each stack. Raises ConfigError if the options or the trace cannot be used."""
    if options.plot:
        check_name(options.plot)
    registry = Registry.discover()
    config = _config(options.config, registry) if options.config else None
    study = studies.read(options, config.chunk_tokens if config and config.chunk_tokens != "auto" else 1)
    plans = list(_of_file(options, config, registry) if config else _of_capacities(options, study, registry))
    studies.check_speeds(study, [config for _, _, config in plans])
    _check_writes(options, study, [config for _, _, config in plans])
    if options.plot:
        _check_curve(options, study, len({_nbytes(config) for _, _, config in plans}))
    stack_of = {capacity: config for capacity, _, config in plans}
    bounds = {capacity: study.bound(config) for capacity, config in stack_of.items()}
    with Bar(len(study.trace.prompts) * sum(policy != _BOUND for _, policy, _ in plans)) as bar:
        rows = _best_first([_simulate(study, *plan, bounds[plan[0]], bar) for plan in plans])
    if options.plot:
        _picture(study, rows).save(options.plot)
    output.say(*studies.describe(study), *_notes(options, study, rows), "", *_table(rows))
    output.value = list(map(_value, rows))
    return FINE


def _check_writes(options: argparse.Namespace, study: Study, configs: Sequence[StackConfig]) -> None:
    """Raise ConfigError if a limit of writes was given that has no effect."""
    if study.writes and options.config:
        raise ConfigError([Problem("--writes", options.writes, "the file states its own", "write it there")])
    if study.writes and not all(config.stores for config in configs):
        raise ConfigError([Problem("--writes", options.writes, "memory has no limit", "give two tiers: 1%+10%")])


def _check_curve(options: argparse.Namespace, study: Study, capacities: int) -> None:
    """Raise ConfigError unless either capacities or limits of writes are several."""
    why = hint = ""
    if len(study.writes) > 1 and capacities > 1:
        why, hint = "several capacities and several limits of writes", "give one capacity, or one limit"
    elif len(study.writes) < 2 and capacities < 2:
        why, hint = "one capacity does not make a curve", "give several: --capacity 1%,5%,10%"
    if why:
        raise ConfigError([Problem("--plot", str(options.plot), why, hint)])


def _config(file: str, registry: Registry) -> StackConfig:
    config = load_config(file, registry)
    for number, tier in enumerate(config.tiers):
        if tier.capacity is None:
            why = "no capacity limit, so its contents cannot be simulated"
            raise ConfigError([config.problem(config.path_of(number), why, "write one, or remove the tier")])
    return config


def _names(options: argparse.Namespace, registry: Registry) -> list[str]:
    """The names of the policies to simulate; the optimum comes first."""
    names = (options.policy or "all").split(",")
    if "all" in names:
        names = [_BOUND, *stacks.all_policies(registry)]
    return sorted(names, key=lambda name: name != _BOUND)


def _of_file(
    options: argparse.Namespace, config: StackConfig, registry: Registry
) -> Iterator[tuple[str, str, StackConfig]]:
    """Capacity and policy in words, and the stack: with the file's own policies, or with each of those asked for."""
    yield options.config, _BOUND, config
    if not options.policy:
        yield options.config, "+".join(tier.eviction.type for tier in config.tiers), config
        return
    for name in _names(options, registry):
        if name != _BOUND:
            policies = stacks.read_policies(name, len(config.tiers), registry)
            yield options.config, name, stacks.with_policies(config, policies)


def _of_capacities(
    options: argparse.Namespace, study: Study, registry: Registry
) -> Iterator[tuple[str, str, StackConfig]]:
    """Capacity and policy in words, and the stack: one for each limit of writes; the optimum has none."""
    for text in options.capacity.split(","):
        capacities = stacks.read_capacities(text, study.trace, study.layout)
        for name in _names(options, registry):
            policies = stacks.read_policies("lru" if name == _BOUND else name, len(capacities), registry)
            for per_day in (None,) if name == _BOUND else study.writes or (None,):
                tokens, packing = study.trace.chunk_tokens, study.packing
                yield text, name, stacks.stack_of(capacities, policies, tokens, packing=packing, per_day=per_day)


def _notes(options: argparse.Namespace, study: Study, rows: Sequence[Row]) -> Iterator[str]:
    theirs, ours = rows[0].config.chunk_tokens, study.trace.chunk_tokens
    if theirs not in ("auto", ours):
        yield f"{options.config} has chunks of {theirs} tokens; simulated are the trace's, of {ours}"


def _simulate(study: Study, capacity: str, policy: str, config: StackConfig, bound: Tally, bar: Bar) -> Row:
    bar.label = f"{policy} at {capacity}"
    return Row(capacity, policy, config, bound if policy == _BOUND else study.run(config, bar.tick), bound)


def _best_first(rows: Sequence[Row]) -> list[Row]:
    """The rows sorted within each capacity, best first; the optimum stays first."""
    order = {capacity: i for i, capacity in enumerate(dict.fromkeys(row.capacity for row in rows))}
    return sorted(rows, key=lambda row: (order[row.capacity], row.policy != _BOUND, -row.tally.hit_rate))


def _table(rows: Sequence[Row]) -> Iterator[str]:
    """The lines of the table. The optimum writes nothing: it knows beforehand what to keep."""
    tiers = list(dict.fromkeys(tier.name for row in rows for tier in row.config.tiers))
    several = tiers if len(tiers) > 1 else []
    limited = ["writes a day"] if any(row.per_day for row in rows) else []
    header = ["capacity", "policy", *limited, "hits", "of min", *several, "mean", "p95"]
    header += [f"into {tier}" for tier in tiers]
    lines = [
        [
            row.capacity,
            row.policy,
            *(str(row.per_day or "any") for _ in limited),
            f"{row.tally.hit_rate:.2%}",
            f"{row.tally.hit_rate / (row.bound.hit_rate or 1):.1%}",
            *(f"{row.tally.hits[tier] / row.tally.tokens:.2%}" for tier in several),
            studies.ms(row.tally.mean),
            studies.ms(row.tally.p95),
            *(size(row.tally.written[tier]) if row.tally.written else "" for tier in tiers),
        ]
        for row in rows
    ]
    return table(header, lines, left=2)


def _value(row: Row) -> dict[str, Any]:
    """A row, for programs: sizes in bytes, times in seconds."""
    return {
        "capacity": row.capacity,
        "policy": row.policy,
        "writes_per_day": row.per_day,
        "hit_rate": row.tally.hit_rate,
        "optimum": row.bound.hit_rate,
        "hits": dict(row.tally.hits),
        "mean": row.tally.mean,
        "p95": row.tally.p95,
        "written": dict(row.tally.written or {}),
    }


def _picture(study: Study, rows: Sequence[Row]) -> Picture:
    """Curves over the limits of writes if they are several, else over the capacities."""
    policies = dict.fromkeys(row.policy for row in rows if row.policy != _BOUND)
    whole = study.trace.distinct * study.layout.frame_nbytes
    if len(study.writes) > 1:
        title = "Prefix hit rate over writes"
        axis = "bytes that may be written to each store tier, on a logarithmic scale"
        sizes: dict[str, int] = {str(each): each for each in study.writes}
        below = dict.fromkeys(sizes, "a day")
        bounds = dict.fromkeys(sizes, rows[0].bound.hit_rate)
        rates = {(row.policy, str(row.per_day)): row.tally.hit_rate for row in rows if row.per_day}
    else:
        title = "Prefix hit rate over capacity"
        axis = "capacity, on a logarithmic scale: bytes, and the share of all distinct chunks that fit"
        sizes = {row.capacity: _nbytes(row.config) for row in rows}
        below = {text: size(nbytes) if "%" in text else f"{nbytes / whole:.2%}" for text, nbytes in sizes.items()}
        bounds = {row.capacity: row.bound.hit_rate for row in rows}
        rates = {(row.policy, row.capacity): row.tally.hit_rate for row in rows}
    order = sorted(sizes, key=sizes.__getitem__)
    return Picture(
        title,
        f"{study.trace.name}: {len(study.trace.prompts):,} prompts, {study.trace.tokens / 1e6:,.0f} million tokens",
        axis,
        tuple(sizes[text] for text in order),
        tuple((text, below[text]) for text in order),
        tuple(Curve(policy, tuple(rates[policy, text] for text in order)) for policy in policies),
        Curve("optimum", tuple(bounds[text] for text in order)),
    )


def _nbytes(config: StackConfig) -> int:
    return sum(tier.capacity or 0 for tier in config.tiers)
