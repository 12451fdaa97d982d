"""`kvtier serve`: one cache for all engines of a node, in a process that outlives them."""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import resource
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from kvtier_core.cli.output import FINE, Output
from kvtier_core.config.load import load_config
from kvtier_core.config.model import UNIX, StackConfig
from kvtier_core.config.registry import Registry
from kvtier_core.errors import BackendError, ConfigError
from kvtier_core.storekit.trial import TrialFolder
from kvtier_core.storekit.user_folders import runtime_folder
from kvtier_core.types import Nbytes
from kvtier_doctor.check import programs_not_found
from kvtier_serve.commands import actions
from kvtier_serve.operators.asking import RunningServer

if TYPE_CHECKING:
    from kvtier_serve.operators.listening import Listening
    from kvtier_serve.quotas import QuotaBook
    from kvtier_serve.tenants import Quota

#: Settings that each engine has for itself.
_OF_ENGINES = (
    *("server", "chunk_tokens", "token_database", "load_wait", "load", "save_decode", "identity", "on_reset"),
    *("requests", "audit_every", "status", "log_requests", "observers"),
)
#: Seconds that writes may take after SIGTERM.
_CLOSING = 30.0


def add_to(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "serve",
        help="serve the tiers of a file to all engines of this node",
        description="Serve the tiers of a file to all engines of this node, which write server: unix:PATH. Runs until "
        "SIGTERM or SIGINT, and then lets writes finish; SIGHUP reloads. With an ACTION: ask a running server.",
    )
    actions.add_to(parser.add_subparsers(metavar="ACTION"))
    asked = parser.add_mutually_exclusive_group()
    asked.add_argument("--config", metavar="FILE", help="the YAML file with the tiers")
    asked.add_argument("--probe", metavar="PATH", help="ask the server at PATH whether it makes progress")
    what = "print the links that open the page of the server whose operators' socket this is, with the token in them"
    asked.add_argument("--link", metavar="PATH", help=what)
    parser.add_argument(
        "--socket", metavar="PATH", help="the socket to listen on; default: one in this user's runtime folder"
    )
    for kind, when in (("soft", "before all others"), ("hard", "at once")):
        what = f"memory that the chunks of one cache_salt may take; what exceeds it is evicted {when}"
        parser.add_argument(f"--{kind}-quota", type=Nbytes.parse, metavar="SIZE", help=what)
    what = "memory that a model may take, as SOFT, SOFT:HARD or :HARD; may be repeated"
    parser.add_argument("--model-quota", action="append", default=[], metavar="MODEL=SIZES", help=what)
    what = "a JSON file instead of these options; quotas that operators set are saved in it and outlive the server"
    parser.add_argument("--quotas", type=Path, metavar="FILE", help=what)
    what = "also answer operators there, with a token; unix:PATH: without one, and instead of SOCKET.http"
    parser.add_argument("--http", action="append", default=[], metavar="HOST:PORT|unix:PATH", help=what)
    parser.add_argument("--http-cert", metavar="FILE", help="the certificate (PEM) of --http HOST:PORT, for TLS")
    parser.add_argument("--http-key", metavar="FILE", help="its key; default: in the same file")
    parser.add_argument("--check", action="store_true", help="open the tiers, describe them, and exit")
    parser.set_defaults(run=run, ask=None)


def run(options: argparse.Namespace, output: Output) -> int:
    """Serve, or ask a server. Raises ConfigError, and BackendError if the socket is not available."""
    if options.ask:
        path = Path(options.socket) if options.socket else _usual_path()
        status: int = options.ask(RunningServer.at_socket(operators_socket(path)), options, output)
        return status
    from kvtier_remote.memory import probe
    from kvtier_serve.operators.http import HTTP
    from kvtier_serve.reload import Reload
    from kvtier_serve.server import Server

    if options.probe:
        probe(Path(options.probe))
        output.say(f"the server at {options.probe} responds")
        return FINE
    if options.link:
        output.say(*RunningServer.at_socket(Path(options.link)).ask("GET", "/links"))
        return FINE
    if not options.config:
        raise BackendError("pass --config FILE to serve it; see kvtier serve --help for actions on a running server")
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # until there is something to reload
    config = _read(options.config)
    quotas = _quotas(options)
    if options.check:
        return _check(config, options, output)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    path = Path(options.socket) if options.socket else _usual_path()
    most_files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, most_files))
    with _listening_on(path):
        server = Server(config, path, quotas=quotas)
    with contextlib.ExitStack() as closing:
        closing.callback(server.close, _CLOSING)
        reload = Reload(server.spaces, server.quotas, server.programs, lambda: _read(options.config))
        server.reload = reload
        signal.signal(signal.SIGHUP, lambda *_: reload.on_signal(server.ask))
        output.say(*server.spaces.describe())
        output.say(*_answer_operators(HTTP(server), path, options, closing))
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: server.stop())
        output.say(f"ready; in an engine's file, write in place of tiers: server: {UNIX}{path}")
        sys.stdout.flush()
        server.programs.begin(config.programs, _told(options, path))
        notify("READY=1")
        server.serve()
        notify("STOPPING=1")
    return FINE


def _read(file: str) -> StackConfig:
    """The tiers to serve. Raises ConfigError, also for settings that would have no effect here."""
    config = load_config(file, Registry.discover())
    written = [name for name in _OF_ENGINES if config.origin(f"$.{name}") != "default"]
    if written:
        why = "is a setting of engines, not of their server"
        raise ConfigError([config.problem(f"$.{name}", why, "set it in their files") for name in written])
    return config


def _quotas(options: argparse.Namespace) -> QuotaBook:
    """The quotas of the file, or of the options. Raises ConfigError and BackendError."""
    from kvtier_serve.quotas import QuotaBook, Quotas, checked

    if options.quotas and (options.soft_quota, options.hard_quota, options.model_quota) != (None, None, []):
        raise BackendError(f"write all quotas in {options.quotas}, or all as options")
    try:
        each_tenant = checked(options.soft_quota, options.hard_quota)
        models = dict(map(_model_quota, options.model_quota))
    except ValueError as error:
        raise BackendError(f"invalid quota: {error}") from error
    return QuotaBook(Quotas(each_tenant, models), options.quotas)


def _model_quota(written: str) -> tuple[str, Quota]:
    """A model, with its soft and hard quota. Raises ValueError."""
    from kvtier_serve.quotas import checked

    model, _, sizes = written.rpartition("=")
    try:
        if not model or sizes.count(":") > 1:
            raise ValueError("write MODEL=SOFT, MODEL=SOFT:HARD or MODEL=:HARD")
        soft, _, hard = sizes.partition(":")
        return model, checked(*(Nbytes.parse(size) if size else None for size in (soft, hard)))
    except ValueError as error:
        raise ValueError(f"--model-quota {written}: {error}") from error


def _check(config: StackConfig, options: argparse.Namespace, output: Output) -> int:
    """Open what a server opens when it starts, describe it, and leave no trace."""
    from kvtier_core.storekit import trial
    from kvtier_serve.memories import check
    from kvtier_serve.operators.listening import listening_for_nobody
    from kvtier_serve.server import try_out

    trial.forget()
    path = Path(options.socket) if options.socket else _usual_path(trial=True)
    lines = check(config)
    with _listening_on(path):
        try_out(path)
    with contextlib.ExitStack() as closing:
        list(_answer_operators(listening_for_nobody(), path, options, closing))
    output.say(*lines)
    for line in programs_not_found(config):
        output.warn(line)
    return FINE


@contextlib.contextmanager
def _listening_on(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise BackendError(f"cannot listen on {path}: {error.strerror or error}") from error


def _answer_operators(
    http: Listening, path: Path, options: argparse.Namespace, closing: contextlib.ExitStack
) -> Iterator[str]:
    """Answer at a Unix socket, and at the addresses in the options; yields all of them. Raises BackendError."""
    closing.callback(http.close)
    own = _own_address(options, path)
    for address in (own, *(each for each in options.http if each != own)):
        try:
            where = http.open(address, options.http_cert, options.http_key)
            yield where if address is own else f"{where}; see kvtier serve --link {own.removeprefix(UNIX)}"
        except BackendError as error:
            if address in options.http:
                raise
            yield f"operators are not answered: {error}"


def _own_address(options: argparse.Namespace, path: Path) -> str:
    """The Unix socket at which the server at ``path`` answers operators."""
    return next((each for each in options.http if each.startswith(UNIX)), f"{UNIX}{operators_socket(path)}")


def _told(options: argparse.Namespace, path: Path) -> dict[str, str]:
    """What the programs of the server at ``path`` find in their environment. KVTIER_CONFIG is the file of an engine."""
    http = Path(_own_address(options, path).removeprefix(UNIX))
    return {
        "KVTIER_SOCKET": str(path.absolute()),
        "KVTIER_HTTP": f"{UNIX}{http.absolute()}",
        "KVTIER_SERVE_CONFIG": str(Path(options.config).absolute()),
    }


def operators_socket(path: Path) -> Path:
    """The socket at which the server at ``path`` answers operators, unless `--http unix:PATH` puts it elsewhere."""
    return path.with_name(f"{path.name}.http")


def notify(state: str) -> None:
    """Tell systemd, if it started this process (sd_notify)."""
    if address := os.environ.get("NOTIFY_SOCKET"):
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
            sock.connect("\0" + address[1:] if address.startswith("@") else address)
            sock.sendall(state.encode())


def _usual_path(*, trial: bool = False) -> Path:
    if os.getuid() != 0:
        return runtime_folder(trial=trial) / "kvtier.sock"
    folder = Path("/run/kvtier")
    if not trial:
        folder.mkdir(mode=0o700, exist_ok=True)
    elif not os.path.exists(folder):
        TrialFolder.at(folder, make=True)
    return folder / "kvtier.sock"
