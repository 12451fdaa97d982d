"""The file of a fleet: which servers there are, and what is declared for all of them."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import attrs

from kvtier_core.config import decode, yaml_nodes
from kvtier_core.config.decode import Setting
from kvtier_core.config.model import UNIX, Config
from kvtier_core.config.scalars import Unavailable
from kvtier_core.config.yaml_nodes import Node, ProblemCollector
from kvtier_core.types import EnvSecret, Nbytes, Seconds
from kvtier_serve.operators.asking import host_and_port


def _check_servers(settings: object, field: attrs.Attribute, servers: tuple[str, ...]) -> None:
    for server in servers:
        if not server.startswith(UNIX):
            host_and_port(server)


def _check_bounds(settings: TenantQuota | ModelQuota, field: attrs.Attribute, hard: Nbytes | None) -> None:
    if settings.soft is not None and hard is not None and settings.soft > hard:
        raise ValueError("a soft quota is at most the hard one")


def _check_patience(settings: object, field: attrs.Attribute, patience: float) -> None:
    if patience <= 0:
        raise ValueError("a server needs more than 0s to answer")


@attrs.frozen
class TenantQuota:
    """Memory of one tenant on all servers together."""

    cache_salt: EnvSecret
    soft: Nbytes | None = None
    hard: Nbytes | None = attrs.field(default=None, validator=_check_bounds)


@attrs.frozen
class ModelQuota:
    """Memory of one model on all servers together."""

    model: str
    soft: Nbytes | None = None
    hard: Nbytes | None = attrs.field(default=None, validator=_check_bounds)


@attrs.frozen
class PinnedPrompt:
    """A prompt that servers keep in memory."""

    name: str
    prompt: Path  #: its token ids, a list in JSON, or what vLLM's ``/tokenize`` answers
    cache_salt: EnvSecret | None = None
    namespace: str = ""  #: the first digits of the one that it is for; needed on servers with several


@attrs.frozen
class FleetSettings:
    """The servers, and what is declared for all of them."""

    #: HOST:PORT, or unix:PATH of an operators' socket. A name stands for all its addresses, and is resolved each time.
    servers: tuple[str, ...] = attrs.field(default=(), validator=_check_servers)
    file: Path | None = None  #: more servers, one per line
    token: EnvSecret | None = None  #: that of the servers at addresses; default: KVTIER_HTTP_TOKEN, if it is set
    ca: Path | None = None  #: with TLS: the authority that signed the certificates of the servers
    #: Silence after which a server counts as one that does not answer.
    patience: Seconds = attrs.field(default=Seconds(9.0), validator=_check_patience)
    tenants: tuple[TenantQuota, ...] = ()
    models: tuple[ModelQuota, ...] = ()
    pins: tuple[PinnedPrompt, ...] = ()


def load(file: Path) -> FleetSettings:
    """Read the YAML file of a fleet. Raises ConfigError with every problem found."""
    collector = ProblemCollector()
    root = yaml_nodes.from_file(file, collector)
    known = {"version": Setting(decode.reader(Literal[1]), required=True), **decode.settings(FleetSettings)}
    values = decode.read_keys(root, known, _no_plugins, collector)
    decode.validate(FleetSettings, root, values, collector)
    _check_there_are_servers(root, collector)
    collector.raise_if_any()
    return decode.construct(FleetSettings, root, {key: each for key, each in values.items() if key != "version"})


def _no_plugins(family: type[Config], name: str) -> Unavailable:
    return Unavailable(f"no setting of a fleet takes a {family.__name__}")


def _check_there_are_servers(root: Node, collector: ProblemCollector) -> None:
    if not {"servers", "file"} & root.entries().keys():
        why = "a fleet needs servers"
        collector.problems.append(root.problem(why, "list them in 'servers', or name a file that does in 'file'"))
