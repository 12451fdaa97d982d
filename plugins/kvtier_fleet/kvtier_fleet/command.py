"""`kvtier fleet ACTION`: what an operator asks of all servers at once."""

from __future__ import annotations

import argparse
import functools
import os
from collections.abc import Callable
from pathlib import Path

from kvtier_core.cli.output import Output
from kvtier_core.errors import BackendError
from kvtier_core.types import Nbytes, Seconds
from kvtier_doctor import pins, top
from kvtier_doctor.explain import add_salt_to
from kvtier_fleet import actions, draining
from kvtier_fleet.fleet import Fleet
from kvtier_fleet.settings import FleetSettings, load
from kvtier_serve.commands.actions import add_documents_to, add_prompt_to

#: The file of the fleet, if no option names it.
_VARIABLE = "KVTIER_FLEET"


def add_to(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "fleet",
        help="ask and steer the servers of many nodes",
        description="Ask the servers (kvtier serve) of many nodes at once. Those that do not answer are named.",
    )
    where = parser.add_mutually_exclusive_group()
    what = f"the YAML file with the servers; default: the one in the environment variable {_VARIABLE}"
    where.add_argument("--config", type=Path, metavar="FILE", help=what)
    what = "a server, instead of a file; may be repeated"
    where.add_argument("--server", action="append", default=[], metavar="HOST:PORT|unix:PATH", help=what)
    parser.set_defaults(run=run)
    add = functools.partial(_add, parser.add_subparsers(required=True, metavar="ACTION"))
    add("status", actions.status, "show each server's engines and memory, and the tiers that rest")
    top.add_watch_to(add("top", actions.watch, "watch the servers, with GB/s"))
    add_prompt_to(add("find", actions.find, "say which servers hold a prompt, in which tiers"))
    what = "find the order of documents with the longest cached prefix, on each server"
    add_documents_to(add("arrange", actions.arrange, what))
    add_prompt_to(add("prefetch", actions.prefetch, "bring a prompt into memory ahead of its request"))
    what = "bring what only one server has in memory into that of others, which are its peers, before it goes"
    add("drain", draining.drain, what).add_argument("drained", metavar="SERVER", help="its name in status")
    for name, run_, what in (
        ("clear", actions.clear, "drop what the memory holds and no engine uses"),
        ("erase", actions.erase, "delete the chunks of a tenant or a namespace from all tiers"),
    ):
        each = add(name, run_, what)
        each.add_argument("--namespace", default="", help="only this one: its first digits, as shown by serve status")
        each.add_argument("--yes", action="store_true", help="do not ask")
        if run_ is actions.erase:
            add_salt_to(each)
    quota = add("quota", actions.quota, "show the quotas of all servers, or share one between them")
    add_salt_to(quota.add_mutually_exclusive_group()).add_argument("--model", help="set the quota of this model")
    for kind in ("soft", "hard"):
        what = "on all servers together; default: any size"
        quota.add_argument(f"--{kind}", type=Nbytes.parse, metavar="SIZE", help=what)
    kept = add("pins", actions.pins, "show the prompts that are kept in memory, or change one")
    pins.add_changes_to(kept)
    add_prompt_to(kept, required=False)
    apply = add("apply", actions.apply, "set the quotas and pins that the file declares")
    what = "apply them again and again, also to servers that come later or restart"
    apply.add_argument("--every", type=Seconds.parse, metavar="TIME", help=what)
    answer = add("serve", actions.serve, "answer operators over HTTP, with a page, until SIGTERM")
    what = "an address, with a token, or a socket for this user; may be repeated"
    answer.add_argument("--http", action="append", required=True, metavar="HOST:PORT|unix:PATH", help=what)
    answer.add_argument("--http-cert", metavar="FILE", help="the certificate (PEM) of --http HOST:PORT, for TLS")
    answer.add_argument("--http-key", metavar="FILE", help="its key; default: in the same file")


def run(options: argparse.Namespace, output: Output) -> int:
    """Ask the fleet. Raises ConfigError and BackendError."""
    status: int = options.act(Fleet(_settings(options)), options, output)
    return status


def _settings(options: argparse.Namespace) -> FleetSettings:
    if options.server:
        try:
            return FleetSettings(tuple(options.server))
        except ValueError as error:
            raise BackendError(f"--server: {error.args[0]}") from error
    options.config = options.config or Path(os.environ.get(_VARIABLE, ""))
    if options.config != Path():
        return load(options.config)
    raise BackendError(f"specify the servers: --config FILE, {_VARIABLE}, or --server HOST:PORT")


def _add(among: argparse._SubParsersAction, name: str, act: Callable[..., int], what: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = among.add_parser(name, help=what, description=f"{what[0].upper()}{what[1:]}.")
    what = "only this server, by its name in status; may be repeated"
    parser.add_argument("--on", action="append", default=[], metavar="SERVER", help=what)
    parser.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help="print one JSON value")
    parser.set_defaults(act=act)
    return parser
