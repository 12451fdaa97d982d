"""What an operator asks of a fleet, and how the answers are shown.

Each action exits with PROBLEMS if a server did not answer, or refused: what was asked was then done only in part.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import logging
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import attrs

from kvtier_core.cli.output import FINE, PROBLEMS, Output, agreed, table
from kvtier_core.errors import BackendError, ConfigError
from kvtier_doctor import explain, top
from kvtier_doctor.explain import salt_of
from kvtier_fleet.fleet import Answers, Fleet
from kvtier_fleet.seen import HEAD, Seen, row, speeds
from kvtier_fleet.settings import load
from kvtier_serve.commands.actions import bound_of, documents_of, pin_path, prompt_of
from kvtier_serve.operators.forms import AllQuotas, Arranged, Brought, Done, Erased, Explained, Pin, Pinned

_BOUNDS = ("soft", "hard")


def status(fleet: Fleet, options: argparse.Namespace, output: Output) -> int:
    """A line for each server, and their sum."""
    found = fleet.ask("GET", "/status", form=Seen, on=options.on)
    rows = [row(name, [each]) for name, each in found.told.items()]
    output.say(*table(HEAD, [*rows, row("all", list(found.told.values()))], left=1))
    resting = [f"{name}: {tier} rests" for name, each in found.told.items() for tier in each.resting()]
    for line in resting:
        output.warn(line)
    return _ended(found, output) or (PROBLEMS if resting else FINE)


def watch(fleet: Fleet, options: argparse.Namespace, output: Output) -> int:
    """The same again and again, with GB/s."""

    def look() -> tuple[list[dict[str, Any]], list[BackendError]]:
        found = fleet.ask("GET", "/status", form=Seen, on=options.on)
        return [{"boot": "fleet", "servers": found.told}] if found.told else [], list(found.silent.values())

    def lines(now: Mapping[str, Any], before: Mapping[str, Any] | None) -> Iterator[str]:
        servers = now["servers"]
        moved = speeds(servers, before["servers"] if before else {})
        rows = [[*row(name, [each]), *cells] for (name, each), cells in zip(servers.items(), moved, strict=True)]
        yield from table((*HEAD, "stored GB/s", "loaded GB/s"), rows, left=1)

    return top.watch(look, lines, options, output)


def find(fleet: Fleet, options: argparse.Namespace, output: Output) -> int:
    """The servers by how much of a prompt they can load."""
    found = fleet.ask("POST", "/explain", prompt_of(options), Explained, options.on)
    rows = []
    for name, each in sorted(found.told.items(), key=lambda item: -_leading(item[1])):
        leading = _leading(each)
        tiers = Counter(tier for chunk in each.chunks[:leading] for tier in chunk.tiers)
        where = ", ".join(f"{chunks} {tier}" for tier, chunks in tiers.items()) or "-"
        why = each.chunks[leading].miss_reason if leading < len(each.chunks) else ""
        rows.append([name, f"{leading * each.chunk_tokens}", f"{leading} of {len(each.chunks)}", where, why])
    output.say(*table(("server", "tokens", "chunks", "in tiers", "why no more"), rows, left=1))
    return _ended(found, output)


def _leading(explained: Explained) -> int:
    """Chunks that can be loaded, up to the first that cannot."""
    return len(list(itertools.takewhile(lambda chunk: chunk.tiers, explained.chunks)))


def arrange(fleet: Fleet, options: argparse.Namespace, output: Output) -> int:
    """The best order of documents on each server, longest cached prefix first."""
    found = fleet.ask("POST", "/arrange", documents_of(options), Arranged, options.on)
    rows = [
        [name, " ".join(map(str, each.best.documents)), f"{each.best.cached_tokens}", f"{each.requested.cached_tokens}"]
        for name, each in sorted(found.told.items(), key=lambda item: -item[1].best.cached_tokens)
    ]
    output.say(*table(("server", "order", "cached tokens", "in the order of the file"), rows, left=2))
    for name in [name for name, each in found.told.items() if not each.exhaustive]:
        output.warn(f"{name}: there are too many orders to try all of them; a better one may exist")
    return _ended(found, output)


def prefetch(fleet: Fleet, options: argparse.Namespace, output: Output) -> int:
    """Bring a prompt into the memory of the servers."""
    found = fleet.ask("POST", "/prefetch", prompt_of(options), Brought, options.on)
    rows = [[name, str(each.in_memory), str(each.chunks), ", ".join(each.asked) or "-"] for name, each in _of(found)]
    output.say(*table(("server", "in memory", "on their way", "asked for more"), rows, left=1))
    return _ended(found, output)


def clear(fleet: Fleet, options: argparse.Namespace, output: Output) -> int:
    """Drop unused chunks."""
    what = f"all chunks of namespace {options.namespace}…" if options.namespace else "everything that no engine uses"
    if not options.yes and not agreed(f"Drop {what} from the memory of {_whose(options)}? [y/N] "):
        output.warn("nothing was dropped")
        return PROBLEMS
    found = fleet.ask("POST", "/clear", {"namespace": options.namespace}, Done, options.on)
    output.say(*(f"{name}: {each.chunks} chunks dropped" for name, each in _of(found)))
    return _ended(found, output)


def erase(fleet: Fleet, options: argparse.Namespace, output: Output) -> int:
    """Delete what a tenant or a namespace has everywhere. PROBLEMS also if something is left for another call."""
    condemned = {"namespace": options.namespace, "cache_salt": salt_of(options)}
    if not any(condemned.values()):
        raise BackendError("specify what to erase: --cache-salt env:NAME, --namespace DIGITS, or both")
    whose = [f"namespace {options.namespace}…"] if options.namespace else []
    whose += [f"the tenant of {options.cache_salt}"] if options.cache_salt else []
    if not options.yes and not agreed(f"Erase the chunks of {' and '.join(whose)} on {_whose(options)}? [y/N] "):
        output.warn("nothing was erased")
        return PROBLEMS
    found = fleet.ask("POST", "/erase", condemned, Erased, options.on)
    left = False
    for name, receipt in _of(found):
        output.say(*(f"{name}: {tier}: {chunks} chunks erased" for tier, chunks in receipt.deleted.items()))
        for tier, chunks in receipt.left.items():
            if chunks:
                left = True
                output.warn(f"{name}: {tier}: {chunks} chunks are in use, or not overwritten yet; erase again")
    for line in sorted({line for receipt in found.told.values() for line in receipt.unreachable}):
        output.warn(line)
    return _ended(found, output, "not erased there") or (PROBLEMS if left else FINE)


def quota(fleet: Fleet, options: argparse.Namespace, output: Output) -> int:
    """Show all quotas, or share one between the servers."""
    bounds = {kind: getattr(options, kind) for kind in _BOUNDS}
    if options.cache_salt:
        found = fleet.share("/quota", {"cache_salt": salt_of(options), **bounds}, options.on)
    elif options.model:
        found = fleet.share("/quota/model", {"model": options.model, **bounds}, options.on)
    elif any(bound is not None for bound in bounds.values()):
        raise BackendError("specify whose quota that is: --cache-salt env:NAME or --model MODEL")
    else:
        found = fleet.ask("GET", "/quota", form=AllQuotas, on=options.on)
    rows = []
    for name, each in _of(found):
        quotas = [["each tenant", "", each.each_tenant]]
        quotas += [["tenant", tenant, limits] for tenant, limits in each.tenants.items()]
        quotas += [["model", model, limits] for model, limits in each.models.items()]
        rows += [[name, kind, which, bound_of(limits.soft), bound_of(limits.hard)] for kind, which, limits in quotas]
    output.say(*table(("server", "quota of", "", *_BOUNDS), rows, left=3))
    return _ended(found, output)


def pins(fleet: Fleet, options: argparse.Namespace, output: Output) -> int:
    """Show all pins, or keep a prompt, or keep it no longer."""
    if options.add:
        if not options.prompt:
            raise BackendError("specify what to keep: --prompt FILE")
        lasting = {"seconds": options.lasting} if options.lasting else {}
        found = fleet.ask("PUT", pin_path(options.add), {**prompt_of(options), **lasting}, Pinned, options.on)
        for name, each in _of(found):
            left_out = f", {each.left_out} have no room" if each.left_out else ""
            output.say(f"{name}: {each.chunks} chunks are kept, {each.pending} may follow{left_out}")
    elif options.delete:
        found = fleet.ask("DELETE", pin_path(options.delete), form=Done, on=options.on)
        output.say(*(f"{name}: {each.chunks} slots are kept no longer" for name, each in _of(found)))
    else:
        found = fleet.ask("GET", "/pins", form=list[Pin], on=options.on)
        rows = [
            [
                name,
                pin.name,
                pin.model,
                str(pin.chunks),
                f"{pin.slots}{' …' * pin.pending}",
                f"{pin.seconds / 3600:.1f} h",
            ]
            for name, several in _of(found)
            for pin in several
        ]
        output.say(*table(("server", "pin", "model", "chunks", "slots", "expires in"), rows, left=3))
    return _ended(found, output)


def serve(fleet: Fleet, options: argparse.Namespace, output: Output) -> int:
    """Answer operators over HTTP until SIGTERM or SIGINT."""
    from kvtier_fleet.http import FleetHTTP  # loads a web framework

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    ended = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())
    with contextlib.closing(FleetHTTP(fleet)) as http:
        output.say(*(http.open(address, options.http_cert, options.http_key) for address in options.http))
        sys.stdout.flush()
        ended.wait()
    return FINE


def apply(fleet: Fleet, options: argparse.Namespace, output: Output) -> int:
    """Set what the file declares, once or again and again; the file is read again each time."""
    if options.server or options.on:
        raise BackendError("quotas and pins are declared for all servers of a file: leave --server and --on out")
    ended = _apply(fleet, output)
    with contextlib.suppress(KeyboardInterrupt):
        while options.every:
            sys.stdout.flush()
            time.sleep(options.every)
            try:
                fleet = Fleet(load(options.config))
            except (ConfigError, BackendError) as error:
                output.warn(f"{error}\nwhat was declared before stays")
            try:
                ended = _apply(fleet, output)
            except BackendError as error:
                output.warn(str(error))
    return ended


def _apply(fleet: Fleet, output: Output) -> int:
    silent: dict[str, BackendError] = {}
    output.value = {}
    for what, answers in _applied(fleet):
        output.say(f"{what}: set on {len(answers.told)} of {len(answers.told) + len(answers.silent)} servers")
        output.value[what] = sorted(answers.told)
        silent |= {str(error): error for error in answers.silent.values()}
    for error in silent.values():
        output.warn(str(error))
    return PROBLEMS if silent else FINE


def _applied(fleet: Fleet) -> Iterator[tuple[str, Answers]]:
    for tenant in fleet.settings.tenants:
        bounds = {"cache_salt": tenant.cache_salt.value, "soft": tenant.soft, "hard": tenant.hard}
        yield f"the quota of {tenant.cache_salt}", fleet.share("/quota", bounds)
    for model in fleet.settings.models:
        yield f"the quota of {model.model}", fleet.share("/quota/model", attrs.asdict(model))
    for pin in fleet.settings.pins:
        prompt = {
            "tokens": explain.tokens_of(pin.prompt),
            "cache_salt": pin.cache_salt.value if pin.cache_salt else "",
            "namespace": pin.namespace,
        }
        yield f"the pin {pin.name}", fleet.ask("PUT", pin_path(pin.name), prompt, Pinned)


# -- for people ------------------------------------------------------------------------------------------


def _of(found: Answers) -> Iterator[tuple[str, Any]]:
    return iter(found.told.items())


def _ended(found: Answers, output: Output, consequence: str = "") -> int:
    """Say who did not answer; the exit status."""
    output.value = found.plain()
    for error in found.silent.values():
        output.warn(f"{error}{f'; {consequence}' if consequence else ''}")
    return PROBLEMS if found.silent else FINE


def _whose(options: argparse.Namespace) -> str:
    return ", ".join(options.on) or "all servers"
