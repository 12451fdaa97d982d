"""Compares the next-token distributions of two runs of one model over the same prompts."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence

import attrs

from kvtier_core.config.quality import Estimate, Figures

#: Resamples of a bootstrap. With more, the ends of an interval move by less than a hundredth of its width.
_RESAMPLES = 2000
_SEED = 0
#: What an engine does not list has at least this probability: sums of rounded probabilities may leave less than 0.
_LEAST = 1e-9


@attrs.frozen
class Place:
    """A model's distribution of the next token at one place of a text."""

    top: Mapping[int, float]  #: natural logarithms of the probabilities of the likeliest tokens
    told: int  #: the token that follows in the text
    told_logprob: float  #: its logarithm, which need not be in ``top``

    @property
    def first(self) -> int:
        """The likeliest token; of several, the one with the least number."""
        return min(self.top, key=lambda token: (-self.top[token], token))


def divergence(reference: Place, other: Place) -> float:
    """A lower bound of the Kullback-Leibler divergence of ``other`` from ``reference``, in nat.

    The outcomes are the tokens that both list, those that only ``reference`` lists as one, and all that remain as one:
    joining outcomes never increases the divergence (Cover and Thomas, Elements of Information Theory, 2.7). In
    ``other``, each token of the second kind is at most as likely as the last one listed; within that limit, what is not
    listed is divided so that the divergence is the least.
    """
    both = reference.top.keys() & other.top.keys()
    pairs = [(math.exp(reference.top[token]), math.exp(other.top[token])) for token in sorted(both)]
    alone = [math.exp(logprob) for token, logprob in sorted(reference.top.items()) if token not in both]
    lost, left = sum(alone), max(0.0, 1.0 - sum(p for p, _ in pairs) - sum(alone))
    unlisted = max(_LEAST, 1.0 - sum(q for _, q in pairs))
    most = len(alone) * math.exp(min(other.top.values()))
    found = min(unlisted * lost / (lost + left), most) if alone else 0.0
    pairs += [(lost, found), (left, unlisted - found)]
    return max(0.0, sum(p * math.log(p / max(_LEAST, q)) for p, q in pairs if p > 0))


def finds(places: Sequence[Place]) -> bool:
    """Is every token of the continuation the likeliest one, so that greedy decoding generates it?"""
    return all(place.first == place.told for place in places)


def bootstrap(samples: Sequence[Sequence[float]], statistic: Callable[[float], float] = lambda mean: mean) -> Estimate:
    """The statistic of the mean of all values, with the percentile interval of Efron's bootstrap.

    ``samples`` holds the values of each prompt. Prompts are drawn, not values: those of one prompt are not independent.
    """
    sums = [(sum(values), len(values)) for values in samples]

    def of(drawn: Sequence[tuple[float, int]]) -> float:
        return statistic(sum(total for total, _ in drawn) / sum(count for _, count in drawn))

    chance = random.Random(_SEED)
    spread = sorted(of(chance.choices(sums, k=len(sums))) for _ in range(_RESAMPLES))
    cut = _RESAMPLES // 40
    value = of(sums)
    return Estimate(value, min(value, spread[cut]), max(value, spread[-cut - 1]))


def compare(reference: Sequence[Sequence[Place]], other: Sequence[Sequence[Place]], needles: Sequence[bool]) -> Figures:
    """The figures of a run; ``reference`` computed everything. ``needles`` says which of the prompts hide one."""
    pairs = list(zip(reference, other, strict=True))
    windows = [pair for pair, needle in zip(pairs, needles, strict=True) if not needle]
    hidden = [pair for pair, needle in zip(pairs, needles, strict=True) if needle]

    def of_places(value: Callable[[Place, Place], float]) -> list[list[float]]:
        return [[value(*places) for places in zip(*window, strict=True)] for window in windows]

    return Figures(
        kl=bootstrap(of_places(divergence)),
        top1=bootstrap(of_places(lambda one, two: float(one.first == two.first))),
        perplexity=bootstrap(of_places(lambda one, two: one.told_logprob - two.told_logprob), math.expm1),
        lost=bootstrap([[float(finds(one)) - float(finds(two))] for one, two in hidden]),
    )
