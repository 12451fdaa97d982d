"""`kvtier plan TRACE`: finds the capacities within a budget, and the policies, that suit a trace best."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from typing import Any

import attrs

from kvtier_core.cli.output import FINE, Output, table
from kvtier_core.config.registry import Registry
from kvtier_core.errors import ConfigError, Problem
from kvtier_core.policies.gittins import GittinsConfig
from kvtier_core.types import Nbytes, size
from kvtier_simulate import stacks, studies
from kvtier_simulate.bar import Bar
from kvtier_simulate.replay import Tally
from kvtier_simulate.study import Study

#: Means that differ by less than this fraction count as equally good.
_ALIKE = 1e-3
#: The tiers as a configuration file has them.
_WRITTEN = ("type: cpu", "type: disk, path: /var/lib/kvtier")


def add_to(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "plan",
        help="find the capacities and policies that suit a trace and a budget",
        description="Replay a trace of prompts through stacks of several sizes and policies within a budget, and print "
        "the tiers of the smallest that saves nearly as much as the best. A long trace takes minutes.",
    )
    studies.add_to(parser)
    parser.add_argument("--ram", required=True, help="memory to use at most, such as 64GiB")
    parser.add_argument("--ssd", help="disk space to use at most")
    parser.add_argument("--policy", default="all", help="policies to choose from: lru,gittins …; default: all")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace, output: Output) -> int:
    """All that was tried, the best first, and what to write. Raises ConfigError."""
    registry = Registry.discover()
    study = studies.read(options)
    if len(study.writes) > 1:
        raise ConfigError([Problem("--writes", options.writes, "several limits", "give one to plan with")])
    if study.writes and not options.ssd:
        raise ConfigError([Problem("--writes", options.writes, "memory has no limit", "give --ssd, too")])
    given = [("--ram", options.ram), ("--ssd", options.ssd)]
    budget = [_size(study, text, option) for option, text in given if text is not None]
    everything = stacks.stack_of(budget, stacks.read_policies("lru", len(budget), registry), study.trace.chunk_tokens)
    studies.check_speeds(study, [everything])
    names = stacks.all_policies(registry) if options.policy == "all" else options.policy.split(",")
    with Bar(_most_runs(len(names), len(budget)) * len(study.trace.prompts)) as bar:
        search = Search(study, registry, bar)
        search.run(names, tuple(budget))
    output.say(*studies.describe(study), "", *_table(search), "", *_advice(search))
    output.value = [_row(each, search.found[each]) for each in search.best_first()]
    return FINE


def _size(study: Study, text: str, option: str) -> Nbytes:
    size = stacks.read_size(text, study.trace, study.layout, option)
    return _rounded(size) if text.endswith("%") else size


@attrs.frozen
class Candidate:
    """A stack that is tried: capacity and policy of each tier."""

    capacities: tuple[Nbytes, ...]
    policies: tuple[str, ...]


@attrs.define
class Search:
    """Finds the policies that suit the whole budget, then tries parts of the budget with them."""

    study: Study
    registry: Registry
    bar: Bar
    found: dict[Candidate, Tally] = attrs.field(factory=dict)

    def run(self, names: Sequence[str], budget: tuple[Nbytes, ...]) -> None:
        """Try the policies of these names. Raises ConfigError."""
        policies = self._policies(names, budget)
        for capacities in _parts(budget):
            if min(capacities) >= self.study.layout.frame_nbytes:
                self._try(capacities, policies)
        for name in names:  # the best policy above a disk need not be the best for memory alone
            self._try(budget[:1], (name,))

    def _policies(self, names: Sequence[str], budget: tuple[Nbytes, ...]) -> tuple[str, ...]:
        """The best policies: the same everywhere, then others in one tier after another, until none is better."""
        for name in names:
            self._try(budget, (name,) * len(budget))
        before: tuple[str, ...] = ()
        best = self.best_first()[0].policies
        while best != before:
            before = best
            for tier in reversed(range(len(budget))):
                for name in names:
                    self._try(budget, (*best[:tier], name, *best[tier + 1 :]))
                best = self.best_first()[0].policies
        return best

    @property
    def best(self) -> Candidate:
        """The candidate with the least mean prefill; of equally good ones, the smallest, then the default policy."""
        others = {each: sum(name != GittinsConfig.type for name in each.policies) for each in self.as_good}
        return min(others, key=lambda each: (sum(each.capacities), others[each], self.found[each].mean))

    @property
    def as_good(self) -> list[Candidate]:
        """The candidates with the least mean prefill, or one that is as good."""
        least = min(tally.mean for tally in self.found.values())
        return [each for each, tally in self.found.items() if tally.mean <= least * (1 + _ALIKE)]

    def best_first(self) -> list[Candidate]:
        """All candidates, those with the least mean prefill first."""
        return sorted(self.found, key=lambda each: self.found[each].mean)

    def _try(self, capacities: tuple[Nbytes, ...], policies: tuple[str, ...]) -> None:
        candidate = Candidate(capacities, policies)
        if candidate not in self.found:
            self.bar.label = f"{'+'.join(policies)} at {_sizes(capacities)}"
            chosen = stacks.read_policies("+".join(policies), len(capacities), self.registry)
            tokens, packing = self.study.trace.chunk_tokens, self.study.packing
            per_day = self.study.writes[0] if self.study.writes else None
            config = stacks.stack_of(capacities, chosen, tokens, packing=packing, per_day=per_day)
            self.found[candidate] = self.study.run(config, self.bar.tick)


def _parts(budget: Sequence[Nbytes]) -> Iterator[tuple[Nbytes, ...]]:
    """Half and a quarter of each tier's capacity."""
    for part in (2, 4):
        for i in range(len(budget)):
            yield tuple(_rounded(size // part) if i == j else size for j, size in enumerate(budget))


def _rounded(nbytes: int) -> Nbytes:
    """A little more, if that is written with fewer digits."""
    unit = next(unit for unit in (40, 30, 20, 10, 0) if nbytes >> unit >= 32 or not unit)
    return Nbytes(-(-nbytes >> unit) << unit)


def _most_runs(policies: int, tiers: int) -> int:
    """As many as two rounds over the tiers take; a third is rare."""
    return policies * (1 + 2 * tiers) + 2 * tiers + policies


def _table(search: Search) -> Iterator[str]:
    """All candidates, the best first."""
    order = search.best_first()
    tiers = ["cpu", "disk"][: max(len(each.capacities) for each in order)]
    header = ["capacity", "policy", "mean", "p95", "hits", *(f"into {tier}" for tier in tiers)]
    rows = [
        [
            _sizes(each.capacities),
            "+".join(each.policies),
            studies.ms(tally.mean),
            studies.ms(tally.p95),
            f"{tally.hit_rate:.2%}",
            *(size(tally.written[tier]) for tier in tiers),
        ]
        for each, tally in ((each, search.found[each]) for each in order)
    ]
    return table(header, rows, left=2)


def _row(candidate: Candidate, tally: Tally) -> dict[str, Any]:
    """A candidate, for programs: sizes in bytes, times in seconds."""
    return {
        "capacities": list(map(int, candidate.capacities)),
        "policies": list(candidate.policies),
        "mean": tally.mean,
        "p95": tally.p95,
        "hit_rate": tally.hit_rate,
        "written": dict(tally.written),
    }


def _advice(search: Search) -> Iterator[str]:
    """The best candidate as it is written in a file, and how much longer less capacity would take."""
    best = search.best
    yield "The least mean prefill:"
    yield ""
    yield "    tiers:"
    for written, capacity, policy in zip(_WRITTEN, best.capacities, best.policies, strict=False):
        arena = written is _WRITTEN[0]
        more = ", packing: auto" if arena and search.study.packing == "auto" else ""
        if not arena and search.study.writes:
            more = f", writes: {{per_day: {search.study.writes[0]}}}"
        yield f"      - {{{written}, capacity: {capacity}, eviction: {policy}{more}}}"
    chosen = len(best.policies)
    ties = {"+".join(each.policies): None for each in search.as_good if each.policies[:chosen] != best.policies}
    if ties:
        yield ""
        yield f"As good: {', '.join(ties)}."
    less: dict[tuple[Nbytes, ...], Candidate] = {}
    for each in search.best_first():
        if sum(each.capacities) < sum(best.capacities):
            less.setdefault(each.capacities, each)
    if less:
        yield ""
    for each in less.values():
        policies = "" if each.policies == best.policies[: len(each.policies)] else f" with {'+'.join(each.policies)}"
        longer = search.found[each].mean / search.found[best].mean - 1
        yield f"{_sizes(each.capacities)}{policies} would take {longer:.1%} longer."


def _sizes(capacities: Sequence[Nbytes]) -> str:
    return "+".join(map(size, capacities))
