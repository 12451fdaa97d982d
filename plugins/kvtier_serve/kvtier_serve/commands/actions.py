"""`kvtier serve status|top|explain|…`: what an operator asks of a running server, over its Unix socket."""

from __future__ import annotations

import argparse
import functools
import json
import urllib.parse
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvtier_core.cli.output import FINE, PROBLEMS, Output, agreed, table
from kvtier_core.errors import BackendError
from kvtier_core.types import Nbytes, size
from kvtier_doctor import explain, pins, status, top
from kvtier_doctor.explain import add_salt_to, salt_of
from kvtier_serve.operators.asking import RunningServer

#: Number of tenants that are shown: those with the most bytes.
_TENANTS = 8
_EVERYTHING = "everything that no engine uses"


def add_to(actions: argparse._SubParsersAction) -> None:
    """Add a parser for each action. Each has ``socket``, the operators' socket of a server."""
    add = functools.partial(_added, actions)
    add("status", _status, "show the memory, the tiers and the tenants of a running server")
    watch = add("top", _top, "watch the memory, the tiers and the tenants of a running server")
    top.add_watch_to(watch)
    prompt = add("explain", _explain, "say where the chunks of a prompt are")
    add_prompt_to(prompt)
    add_documents_to(add("arrange", _arrange, "find the order of documents with the longest cached prefix"))
    clear = add("clear", _clear, "drop what the memory holds and no engine uses")
    erase = add("erase", _erase, "delete the chunks of a tenant or a namespace from all tiers")
    add_salt_to(erase)
    for each in (clear, erase):
        each.add_argument("--namespace", default="", help="only this one: its first digits, as shown by status")
        each.add_argument("--yes", action="store_true", help="do not ask")
    quota = add("quota", _quota, "show the quotas of tenants and models, or set one")
    add_salt_to(quota.add_mutually_exclusive_group()).add_argument("--model", help="set the quota of this model")
    for kind in ("soft", "hard"):
        quota.add_argument(f"--{kind}", type=Nbytes.parse, metavar="SIZE", help="default: any size")
    kept = add("pins", _pins, "show the prompts that are kept in memory, or change one")
    pins.add_changes_to(kept)
    add_prompt_to(kept, required=False)
    add("reload", _reload, "reload the server's files")


def _added(actions: argparse._SubParsersAction, name: str, run: Any, what: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = actions.add_parser(name, help=what, description=f"{what[0].upper()}{what[1:]}.")
    hidden = argparse.SUPPRESS  # the option of the same name of `kvtier serve`, if it is not written here
    parser.add_argument(
        "--socket",
        metavar="PATH",
        default=hidden,
        help="the socket of the server, which answers operators at PATH.http",
    )
    parser.add_argument("--json", action="store_true", default=hidden, help="print one JSON value, for programs")
    parser.set_defaults(ask=run)
    return parser


def add_prompt_to(parser: argparse.ArgumentParser, *, required: bool = True) -> None:
    """Add the options of `prompt_of`."""
    parser.add_argument("--prompt", type=Path, metavar="FILE", required=required, help=explain.PROMPT)
    _add_whose_to(parser)


def add_documents_to(parser: argparse.ArgumentParser) -> None:
    """Add the options of `documents_of`."""
    what = 'token ids in JSON: {"before": [1, 2], "documents": [[3, 4], [5]], "after": [6]}; only documents is required'
    parser.add_argument("--documents", type=Path, metavar="FILE", required=True, help=what)
    _add_whose_to(parser)


def _add_whose_to(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--namespace", default="", help="its namespace: the first digits, as shown by status")
    add_salt_to(parser)


# -- the actions -----------------------------------------------------------------------------------------


def _status(server: RunningServer, options: argparse.Namespace, output: Output) -> int:
    output.value = server.look()
    output.say(*_lines(output.value, output))
    rest = [tier for space in output.value["namespaces"] for tier in space["tiers"] if status.state(tier) != "works"]
    rest += [program for program in output.value["programs"] if program["process"] is None]
    return PROBLEMS if rest else FINE


def _top(server: RunningServer, options: argparse.Namespace, output: Output) -> int:
    def look() -> tuple[list[dict[str, Any]], list[BackendError]]:
        try:
            return [server.look()], []
        except BackendError as error:
            return [], [error]

    def lines(now: Mapping[str, Any], before: Mapping[str, Any] | None) -> Iterator[str]:
        return _lines(now, output, functools.partial(_speeds, now, before))

    return top.watch(look, lines, options, output)


def _explain(server: RunningServer, options: argparse.Namespace, output: Output) -> int:
    prompt = prompt_of(options)
    output.value = server.ask("POST", "/explain", prompt)
    output.say(*explain.of_prompt({**output.value, "tokens": len(prompt["tokens"]), "cold": ""}))
    return FINE


def _arrange(server: RunningServer, options: argparse.Namespace, output: Output) -> int:
    output.value = told = server.ask("POST", "/arrange", documents_of(options))
    rows = [[" ".join(map(str, each["documents"])), str(each["cached_tokens"])] for each in told["by_first_document"]]
    output.say(*table(("order", "cached tokens"), rows, left=1))
    output.say(f"in the order of the file: {told['requested']['cached_tokens']} cached tokens")
    if not told["exhaustive"]:
        output.warn("there are too many orders to try all of them; a better one may exist")
    return FINE


def _clear(server: RunningServer, options: argparse.Namespace, output: Output) -> int:
    what = f"all chunks of namespace {options.namespace}…" if options.namespace else _EVERYTHING
    if not options.yes and not agreed(f"Drop {what} from the server's memory? [y/N] "):
        output.warn("nothing was dropped")
        return PROBLEMS
    output.value = server.ask("POST", "/clear", {"namespace": options.namespace})
    output.say(f"{output.value['chunks']} chunks dropped")
    return FINE


def _erase(server: RunningServer, options: argparse.Namespace, output: Output) -> int:
    """Exits with PROBLEMS if something is left for another call."""
    condemned = {"namespace": options.namespace, "cache_salt": salt_of(options)}
    if not any(condemned.values()):
        raise BackendError("specify what to erase: --cache-salt env:NAME, --namespace DIGITS, or both")
    whose = [f"namespace {options.namespace}…"] if options.namespace else []
    whose += [f"the tenant of {options.cache_salt}"] if options.cache_salt else []
    if not options.yes and not agreed(f"Erase the chunks of {' and '.join(whose)} from all tiers? [y/N] "):
        output.warn("nothing was erased")
        return PROBLEMS
    output.value = server.ask("POST", "/erase", condemned)
    output.say(*(f"{tier}: {chunks} chunks erased" for tier, chunks in output.value["deleted"].items()))
    for line in output.value["unreachable"]:
        output.warn(line)
    left = {tier: chunks for tier, chunks in output.value["left"].items() if chunks}
    for tier, chunks in left.items():
        output.warn(f"{tier}: {chunks} chunks are in use, or not overwritten yet; erase again")
    return PROBLEMS if left else FINE


def _quota(server: RunningServer, options: argparse.Namespace, output: Output) -> int:
    bounds = {kind: getattr(options, kind) for kind in ("soft", "hard")}
    if options.cache_salt:
        output.value = server.ask("PUT", "/quota", {"cache_salt": salt_of(options), **bounds})
    elif options.model:
        output.value = server.ask("PUT", "/quota/model", {"model": options.model, **bounds})
    elif any(size is not None for size in bounds.values()):
        raise BackendError("specify whose quota that is: --cache-salt env:NAME or --model MODEL")
    else:
        output.value = server.ask("GET", "/quota")
    told = output.value
    rows = [["each tenant", "", told["each_tenant"]]]
    rows += [[kind, name, each] for kind in ("tenant", "model") for name, each in told[f"{kind}s"].items()]
    cells = [[kind, name, *(bound_of(each[bound]) for bound in bounds)] for kind, name, each in rows]
    output.say(*table(("quota of", "", "soft", "hard"), cells, left=2))
    if told["lost"]:
        output.warn(f"these quotas are lost when the server stops: {told['lost']}")
    return FINE


def _pins(server: RunningServer, options: argparse.Namespace, output: Output) -> int:
    if options.add:
        if not options.prompt:
            raise BackendError("specify what to keep: --prompt FILE")
        what = {**prompt_of(options), **pins.lasting(options)}
        output.value = server.ask("PUT", pin_path(options.add), what)
        output.say(pins.kept(options.add, output.value))
    elif options.delete:
        output.value = server.ask("DELETE", pin_path(options.delete))
        output.say(pins.deleted(options.delete, output.value))
    else:
        output.value = server.ask("GET", "/pins")
        output.say(*pins.listed(output.value, "model"))
    return FINE


def _reload(server: RunningServer, options: argparse.Namespace, output: Output) -> int:
    """Exits with PROBLEMS if something needs a restart."""
    output.value = told = server.ask("POST", "/reload")
    output.say(*(f"changed: {line}" for line in told["changed"]) if told["changed"] else ["nothing has changed"])
    for line in told["needs_restart"]:
        output.warn(f"needs a restart: {line}")
    return PROBLEMS if told["needs_restart"] else FINE


# -- for people ------------------------------------------------------------------------------------------


def _lines(
    now: Mapping[str, Any],
    output: Output,
    more: Callable[[Mapping[str, Any]], Mapping[str, Sequence[str]]] = lambda space: {},
) -> Iterator[str]:
    """The status for people; ``more`` has further columns for the tiers of a namespace."""
    minutes = int(now["uptime"] // 60)
    yield f"{_count(now['sessions'], 'engine')}, up {minutes // 60} h {minutes % 60} min"
    for memory in now["memory"]:
        lent = f"{size(memory['nbytes'] - memory['free'])} of {size(memory['nbytes'])} lent to models"
        yield f"{memory['tier']}: {lent}{', outlives the server' * memory['kept']}"
    for program in now["programs"]:
        ended = f"last end: {program['last_end']}" if program["last_end"] else ""
        runs = f"process {program['process']}" if program["process"] else "does not run"
        yield f"program {program['name']}: {', '.join(filter(None, (runs, ended)))}"
    for space in now["namespaces"]:
        yield ""
        found = f", {space['found'] / space['asked']:.1%} of {space['asked']} chunks found" if space["asked"] else ""
        about = f"{_count(space['engines'], 'engine')}{found}, namespace {space['namespace'][:16]}…"
        yield status.fitting(f"{space['model']}: {about}")
        yield from status.of_tiers(space["tiers"], output, more(space), but=("hit rate", "saved"))
    tenants = sorted(now["tenants"], key=lambda each: -each["nbytes"])
    if len(tenants) > 1:
        yield ""
        rows = [[each["tenant"], *(bound_of(each[key]) for key in ("nbytes", "soft", "hard"))] for each in tenants]
        yield from table(("tenant", "holds", "soft quota", "hard quota"), rows[:_TENANTS], left=1)
        if len(tenants) > _TENANTS:
            yield f"and {len(tenants) - _TENANTS} more; --json has them"


def _speeds(now: Mapping[str, Any], before: Mapping[str, Any] | None, space: Mapping[str, Any]) -> dict[str, list[str]]:
    earlier = [each for each in before["namespaces"] if each["number"] == space["number"]] if before else []
    then = {"at": before["at"], "tiers": earlier[0]["tiers"]} if before and earlier else None
    return top.speeds({"at": now["at"], "tiers": space["tiers"]}, then)


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"


def bound_of(nbytes: int | None) -> str:
    """A quota, for people."""
    return "any" if nbytes is None else size(nbytes)


# -- what is asked --------------------------------------------------------------------------------------


def prompt_of(options: argparse.Namespace) -> dict[str, Any]:
    """The prompt in a file, as a server takes it. Raises BackendError."""
    return {
        "tokens": explain.tokens_of(options.prompt),
        "namespace": options.namespace,
        "cache_salt": salt_of(options),
    }


def documents_of(options: argparse.Namespace) -> dict[str, Any]:
    """The parts of a prompt in a file, as a server takes them. Raises BackendError."""
    try:
        parts = json.loads(options.documents.read_bytes())
    except (OSError, ValueError) as error:
        raise BackendError(f"cannot read {options.documents}: {error}") from error
    if not isinstance(parts, dict):
        raise BackendError(f'{options.documents}: not an object; write {{"documents": [[1, 2], [3]]}}')
    return {**parts, "namespace": options.namespace, "cache_salt": salt_of(options)}


def pin_path(name: str) -> str:
    """The path of the pin with this name."""
    return f"/pins/{urllib.parse.quote(name, safe='')}"
