"""What becomes of each token of a blended prompt: had already, moved, or computed."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from kvtier_blend.content_index import Moved
from kvtier_blend.settings import BlendSettings


@attrs.frozen
class Plan:
    """Tokens from ``start`` to ``end`` are moved, except those in ``runs``, which are computed among them."""

    start: int  #: a multiple of the engine's block, like ``end``
    end: int
    chunks: tuple[Moved, ...]
    runs: tuple[tuple[int, int], ...]  #: begin and end of each

    @property
    def computed(self) -> int:
        """Number of tokens that are computed between those that are moved."""
        return sum(end - begin for begin, end in self.runs)

    @property
    def moved(self) -> int:
        return self.end - self.start - self.computed


@attrs.frozen
class Refused:
    """There is no plan for a prompt."""

    why: str
    known: frozenset[int] = frozenset()  #: numbers of its chunks that are known elsewhere, if others are new


def make_plan(
    known: Sequence[Moved],
    start: int,
    tokens: int,
    settings: BlendSettings,
    *,
    chunk_tokens: int,
    block_tokens: int,
) -> Plan | Refused:
    """The plan for a prompt of ``tokens`` tokens, of which the engine has the first ``start``.

    A prompt with a part that no earlier one had is not blended: what is computed among moved KV is never stored, so the
    part would never become known.
    """
    last = tokens - max(1, round(settings.tail * tokens))
    chunks = tuple(chunk for chunk in known if start <= chunk.at <= last - chunk_tokens)
    if not chunks:
        return Refused("no chunk after its prefix is known")
    ends = [chunk.at + chunk_tokens for chunk in chunks]
    tail = min([last, *(chunk.at for chunk in known if chunk.at > chunks[-1].at)])  # it may begin in a known chunk
    gaps = zip([start, *ends], [*(chunk.at for chunk in chunks), tail], strict=True)
    # A narrower one may consist of parts of two known chunks.
    if new := [(begin, end) for begin, end in gaps if end - begin >= 2 * chunk_tokens]:
        widest = max(end - begin for begin, end in new)
        parts = {number for begin, end in new for number in range(begin // chunk_tokens, -(-end // chunk_tokens))}
        whole = range(-(-start // chunk_tokens), last // chunk_tokens)
        return Refused(f"{widest} tokens of it in a row are new", frozenset(whole).difference(parts))
    end = -(-ends[-1] // block_tokens) * block_tokens
    if end >= tokens:
        end -= block_tokens
    plan = Plan(start, end, chunks, tuple(_runs(chunks, start, end, settings.link, chunk_tokens)))
    if plan.moved < settings.min_tokens:
        return Refused(f"{plan.moved} of its tokens can be moved, fewer than {settings.min_tokens}")
    return plan


def stretches(chunks: Sequence[Moved], chunk_tokens: int) -> list[list[Moved]]:
    """The chunks in stretches that follow each other here as they did in an earlier prompt."""
    found: list[list[Moved]] = []
    for chunk in chunks:
        before = found[-1][-1] if found else None
        if before and _continues(before, chunk, chunk_tokens):
            found[-1].append(chunk)
        else:
            found.append([chunk])
    return found


def _continues(before: Moved, chunk: Moved, chunk_tokens: int) -> bool:
    is_next = chunk.known.path is before.known.path and chunk.known.number == before.known.number + 1
    return is_next and chunk.at == before.at + chunk_tokens


def _runs(chunks: Sequence[Moved], start: int, end: int, link: int, chunk_tokens: int) -> list[tuple[int, int]]:
    """The gaps between stretches, each with the first ``link`` tokens of the stretch after it."""
    spans = [(each[0].at, each[-1].at + chunk_tokens) for each in stretches(chunks, chunk_tokens)]
    runs: list[tuple[int, int]] = []
    begin = start
    for at, stop in (*spans, (end, end)):
        linked = min(at + link, stop, end)
        if linked > begin:
            first = runs.pop()[0] if runs and runs[-1][1] == begin else begin
            runs.append((first, linked))
        begin = stop
    return runs
