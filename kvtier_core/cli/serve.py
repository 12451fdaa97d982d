"""`kvtier serve`: one cache for all engines of a node, in a process that outlives them."""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import signal
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from kvtier_core.cli.output import FINE, Output
from kvtier_core.cli.tiers import no_new_folders
from kvtier_core.config.load import load_config
from kvtier_core.config.model import UNIX, StackConfig
from kvtier_core.config.registry import Registry
from kvtier_core.engine.worker_reports import runtime_folder
from kvtier_core.errors import BackendError, ConfigError, ContractError
from kvtier_core.types import Nbytes

if TYPE_CHECKING:
    from kvtier_core.server.server import Server

#: Settings that each engine has for itself.
_OF_ENGINES = ("server", "chunk_tokens", "token_database", "load_wait", "load", "save_decode", "identity", "on_reset")
_OF_ENGINES += ("record", "status", "observers")
#: Seconds that writes have after SIGTERM.
_CLOSING = 30.0


def add_to(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "serve",
        help="serve the tiers of a file to all engines of this node",
        description="Serve the tiers of a file to all engines of this node, which write server: unix:PATH. Runs until "
        "SIGTERM or SIGINT, and then lets writes end.",
    )
    asked = parser.add_mutually_exclusive_group(required=True)
    asked.add_argument("--config", metavar="FILE", help="the YAML file with the tiers")
    asked.add_argument("--probe", metavar="PATH", help="ask the server there whether it makes progress")
    parser.add_argument("--socket", metavar="PATH", help="the socket to listen on; default: one of this user's own")
    for kind, when in (("soft", "before all others"), ("hard", "at once")):
        what = f"memory that the chunks of one cache_salt may take; what exceeds it is evicted {when}"
        parser.add_argument(f"--{kind}-quota", type=Nbytes.parse, metavar="SIZE", help=what)
    what = "memory that a model may take, as SOFT, SOFT:HARD or :HARD; may be repeated"
    parser.add_argument("--model-quota", action="append", default=[], metavar="MODEL=SIZES", help=what)
    parser.add_argument("--http", metavar="HOST:PORT", help="the address to answer operators at; default: none")
    parser.add_argument("--check", action="store_true", help="open the tiers, describe them, and exit")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace, output: Output) -> int:
    """Serve. Raises ConfigError, and BackendError if the socket cannot be had."""
    try:
        from kvtier_core.server.memory import probe
        from kvtier_core.server.server import Server
        from kvtier_core.server.spaces import check
        from kvtier_core.server.tenants import Quota
    except ImportError as error:
        raise BackendError(f"kvtier serve needs {error.name}: pip install 'kvtier[serve]'") from error
    if options.probe:
        probe(Path(options.probe))
        output.say(f"the server at {options.probe} makes progress")
        return FINE
    config = load_config(options.config, Registry.discover())
    _check(config)
    if options.check:
        with no_new_folders(tier.keep for tier in config.arenas if tier.keep):
            output.say(*check(config))
        return FINE
    quotas = [(model, Quota(*sizes)) for model, sizes in map(_model_quota, options.model_quota)]
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    path = Path(options.socket) if options.socket else _usual_path()
    try:
        server = Server(config, path, Quota(options.soft_quota, options.hard_quota))
    except OSError as error:
        raise BackendError(f"cannot listen on {path}: {error.strerror}") from error
    with contextlib.ExitStack() as closing:
        closing.callback(server.close, _CLOSING)
        for model, quota in quotas:
            server.spaces.set_quota(model, quota)
        output.say(*server.spaces.describe())
        if options.http:
            output.say(f"operators ask http://{_answer_operators(server, options.http, closing)}")
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: server.stop())
        output.say(f"ready; in an engine's file, write in place of tiers: server: {UNIX}{path}")
        sys.stdout.flush()
        notify("READY=1")
        server.serve()
        notify("STOPPING=1")
    return FINE


def _model_quota(written: str) -> tuple[str, list[Nbytes | None]]:
    """A model, with its soft and hard quota. Raises BackendError."""
    model, _, sizes = written.rpartition("=")
    try:
        if not model or sizes.count(":") > 1:
            raise ValueError("write MODEL=SOFT, MODEL=SOFT:HARD or MODEL=:HARD")
        return model, [Nbytes.parse(size) if size else None for size in sizes.split(":")]
    except ValueError as error:
        raise BackendError(f"--model-quota {written}: {error}") from error


def _answer_operators(server: Server, address: str, closing: contextlib.ExitStack) -> str:
    """Open the HTTP side; returns where. Raises BackendError."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise BackendError(f"{address!r} is no address; write 127.0.0.1:8100")
    try:
        from kvtier_core.server.http import HTTP

        http = HTTP(server, host.strip("[]"), int(port))
    except ImportError as error:
        raise BackendError(f"--http needs {error.name}: pip install 'kvtier[serve]'") from error
    except (OSError, ContractError) as error:
        raise BackendError(f"cannot listen on {address}: {error}") from error
    closing.callback(http.close)
    return f"{host}:{http.port}"


def notify(state: str) -> None:
    """Tell systemd, if it started this process (sd_notify)."""
    if address := os.environ.get("NOTIFY_SOCKET"):
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
            sock.connect("\0" + address[1:] if address.startswith("@") else address)
            sock.sendall(state.encode())


def _check(config: StackConfig) -> None:
    """Raises ConfigError for settings that would do nothing here."""
    written = [name for name in _OF_ENGINES if config.origin(f"$.{name}") != "default"]
    if written:
        why = "is a setting of engines, not of their server"
        raise ConfigError([config.problem(f"$.{name}", why, "write it in their files") for name in written])


def _usual_path() -> Path:
    if os.getuid() != 0:
        return runtime_folder() / "kvtier.sock"
    folder = Path("/run/kvtier")
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder / "kvtier.sock"
