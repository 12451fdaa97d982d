"""Before a server goes: what only its memory has is brought into the memory of others, which read it as its peers."""

from __future__ import annotations

import argparse
import itertools
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from kvtier_core.cli.output import FINE, PROBLEMS, Output
from kvtier_core.errors import BackendError
from kvtier_fleet.fleet import Fleet, of_form
from kvtier_fleet.seen import Seen
from kvtier_serve.operators.asking import RunningServer
from kvtier_serve.operators.forms import Brought, Held

#: The most chunks of a namespace that a server is asked to name, and prompts that it is asked to bring in one turn.
_MOST, _AT_ONCE = 1 << 16, 16
#: Seconds between two rounds, and rounds in a row that bring nothing before the rest is given up.
_PAUSE, _IN_VAIN = 1.0, 5


class _Path(NamedTuple):
    """The chunks of a prompt, and the server that is to bring them."""

    keys: Sequence[str]
    taker: str


def drain(fleet: Fleet, options: argparse.Namespace, output: Output) -> int:
    """Bring the chunks of each namespace. PROBLEMS if some came to no other server, or a server did not answer."""
    source, found = options.drained, fleet.ask("GET", "/status", form=Seen)
    if unknown := sorted({source, *options.on} - found.told.keys()):
        names = ", ".join(found.told)
        raise found.silent.get(unknown[0]) or BackendError(f"{unknown[0]}: no server of this fleet; it has {names}")
    output.value = {}
    for space in found.told[source].namespaces:
        digest = space.namespace
        takers = [
            name
            for name, seen in found.told.items()
            if name != source and any(each.namespace == digest for each in seen.namespaces)
        ]
        held = fleet.ask("POST", "/held", {"namespace": digest, "most": _MOST}, Held, [source, *takers])
        found.silent.update(held.silent)
        if source not in held.told:
            continue
        if not all(-1 <= before < at for at, (_, before) in enumerate(held.told[source].chunks)):
            raise BackendError(f"{source}: the answer cannot be read; the server may be of another release")
        named = {name: {key for key, _ in each.chunks} for name, each in held.told.items()}
        only = named.pop(source).difference(*named.values())
        chosen = {name: keys for name, keys in named.items() if not options.on or name in options.on}
        came = only & _bring(fleet, digest, _shared_out(held.told[source], only, chosen))
        left = len(only) - len(came) + held.told[source].left_out
        output.value[digest] = {"model": space.model, "brought": len(came), "left": left}
        output.say(f"{space.model}: {len(came)} chunks came into the memory of others")
        if left:
            why = "they have no room, or are not its peers" if chosen else "none of these has engines of this model"
            output.warn(f"{space.model}: {left} chunks came to no other server: {why}")
    for error in found.silent.values():
        output.warn(str(error))
    return PROBLEMS if found.silent or any(each["left"] for each in output.value.values()) else FINE


def _shared_out(held: Held, only: set[str], takers: Mapping[str, set[str]]) -> list[_Path]:
    """The prompts with chunks that ``only`` one server has, each with the taker that has most of its beginning.

    Among equals, that is the one with the fewest prompts so far.
    """
    followed = {at for key, at in held.chunks if key in only}
    turns = Counter[str](dict.fromkeys(takers, 0))
    paths: list[_Path] = []
    for number, (last, _) in enumerate(held.chunks if takers else ()):
        if last in only and number not in followed:
            keys, at = [last], held.chunks[number][1]
            while at >= 0:
                key, at = held.chunks[at]
                keys.insert(0, key)
            begun = {name: len(list(itertools.takewhile(has.__contains__, keys))) for name, has in takers.items()}
            taker = max(takers, key=lambda name: (begun[name], -turns[name]))
            turns[taker] += 1
            paths.append(_Path(keys, taker))
    return paths


def _bring(fleet: Fleet, namespace: str, paths: Sequence[_Path]) -> set[str]:
    """Have each taker bring its prompts, again and again while that brings more. Returns the chunks that came."""
    came: set[str] = set()
    in_vain = 0
    while paths and in_vain < _IN_VAIN:
        before, waiting = len(came), defaultdict[str, list[_Path]](list)
        for path in paths:
            waiting[path.taker].append(path)
        paths = []
        for begin in range(0, max(map(len, waiting.values())), _AT_ONCE):
            turn = {taker: its[begin : begin + _AT_ONCE] for taker, its in waiting.items() if its[begin:]}

            def ask(server: RunningServer, turn: Mapping[str, Sequence[_Path]] = turn) -> list[Brought]:
                bodies = [{"namespace": namespace, "keys": path.keys} for path in turn[server.name]]
                return [of_form(Brought, server.ask("POST", "/prefetch", body), server.name) for body in bodies]

            for name, several in fleet.each(ask, list(turn)).told.items():
                for path, brought in zip(turn[name], several, strict=True):
                    came.update(path.keys[: brought.in_memory])
                    if brought.in_memory < len(path.keys):
                        paths.append(path)
        in_vain = 0 if len(came) > before else in_vain + 1
        if paths:
            time.sleep(_PAUSE)
    return came
