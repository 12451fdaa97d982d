"""Starts the scheduler side from the workers' reports: opens the stack, or refuses to serve the engine."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence

import attrs

from kvtier_core import native
from kvtier_core.builtin import packed_slots
from kvtier_core.config.model import StackConfig
from kvtier_core.config.open import Runtime, log_warning, open_observers, open_stack, packs
from kvtier_core.config.server_client import server_client, server_path
from kvtier_core.config.suitable import refuse, unset_secrets
from kvtier_core.config.versions import own_version
from kvtier_core.config.yaml_nodes import ProblemCollector
from kvtier_core.engine.messages import Refusal, WorkerReport
from kvtier_core.engine.scheduler.side import SchedulerSide
from kvtier_core.engine.start.ranks import Ranks
from kvtier_core.interfaces import OpenContext
from kvtier_core.stack.interface import Stack
from kvtier_core.telemetry.observer_feed import Observers
from kvtier_core.types import Namespace, Nbytes

logger = logging.getLogger("kvtier")


@attrs.frozen
class Identity:
    """The namespaces of an engine: engines with equal ones can share KV."""

    namespace: Namespace
    before_start: Namespace  #: of the facts that are known before an engine runs, for comparison


@attrs.frozen
class Engine:
    """The properties of an engine that its host knows."""

    #: Identifies it, by the number of ``chunk_tokens`` and the merged report of its workers; or refuses it.
    identify: Callable[[int, WorkerReport], Identity | Refusal]
    name: str  #: unique among the live engines of this node
    model: str
    version: str  #: of the host, with its name
    stages: int = 1  #: of its pipeline
    replica: int = 0  #: its number among the engines that share this configuration, from 0
    replicas: int = 1  #: number of these engines
    lookahead: int = 0  #: number of tokens after a position that the KV there depends on
    loads: bool = True  #: may it load?
    stores: bool = True  #: may it store?
    recomputes: bool = True  #: does it compute what could not be loaded? Otherwise the request fails.
    #: Is it only a check whether an engine would start? Then nothing changes, and what `open` returns is only closed.
    checking: bool = False
    warn: Callable[[str], object] = log_warning  #: is told what the engine starts without

    def open(self, config: StackConfig, reports: Sequence[WorkerReport]) -> SchedulerSide | Refusal:
        """Open the stack for an engine whose workers sent these reports.

        Raises ConfigError: an engine does not start with an incomplete stack.
        """
        ranks = Ranks(reports, self.stages)
        if refusal := ranks.disagreement() or _missing_mover(config, reports[0].device):
            return Refusal(refusal)
        try:
            sized, chunk = ranks.in_chunks(config)
        except ValueError as error:
            return Refusal(str(error))
        if config.identity.ranks == "any" and (why := reports[0].own_ranks):
            logger.info("kvtier: ranks: any -> own: %s", why)
        identity = self.identify(chunk.tokens, ranks.as_one())
        if isinstance(identity, Refusal):
            return identity
        context = OpenContext(
            namespace=identity.namespace,
            layout=chunk,
            replica=self.replica,
            replicas=self.replicas,
            numa_nodes=ranks.numa_nodes(chunk),
            checking=self.checking,
        )
        device = reports[0].device
        return self._open(sized, context, identity.before_start, device, asked=config.chunk_tokens)

    def _open(
        self, config: StackConfig, context: OpenContext, before_start: Namespace, device: str, *, asked: int | str
    ) -> SchedulerSide:
        """Open the stack, and all else; ``asked`` is ``chunk_tokens`` as it was configured."""
        collector = ProblemCollector()
        with contextlib.ExitStack() as undoing:
            with collector:  # first: others may have their files in the folder of a tier
                stack = self._open_stack(config, context, device)
                undoing.callback(stack.close)
            with collector:
                refuse(unset_secrets(config, config.requests, "$.requests"))
            with collector:
                observers = Observers(open_observers(config, context))
                undoing.callback(observers.close)
            collector.raise_if_any()
            undoing.pop_all()
        self._log_stack(stack, config, context, before_start, asked)
        if cold := stack.why_cold():
            logger.info("kvtier: cold because %s", cold)
        side = SchedulerSide(
            config,
            stack,
            context.namespace,
            context.layout,
            lookahead=self.lookahead,
            loads=self.loads,
            stores=self.stores,
            observers=observers,
        )
        for line in side.describe():
            logger.info("kvtier: %s", line)
        about = {"engine": self.name, "model": self.model, "replica": self.replica}
        about |= {"identity": context.namespace.digest.hex(), "cold": cold}
        side.status.open(config.status, about, self.warn, trial=self.checking)
        return side

    def _open_stack(self, config: StackConfig, context: OpenContext, device: str) -> Stack:
        """Open the stack here, or in the server of this node. Raises ConfigError."""
        why_not = packed_slots.why_not(context.layout)
        if config.server is None:
            packed = packs(config, device)
            if packed and why_not:
                logger.info("kvtier: packing: auto -> off: %s", why_not)
            layout = attrs.evolve(context.layout, packed=packed and not why_not)
            runtime = Runtime(recomputes=self.recomputes, warn=self.warn)
            return open_stack(config, attrs.evolve(context, layout=layout), runtime)
        return server_client().open_stack(
            server_path(config),
            model=self.model,
            engine=self.name,
            namespace=context.namespace,
            layout=attrs.evolve(context.layout, packed=not why_not),
            recomputes=self.recomputes,
        )

    def _log_stack(
        self,
        stack: Stack,
        config: StackConfig,
        context: OpenContext,
        before_start: Namespace,
        asked: int | str,
    ) -> None:
        """Log what was opened: sizes, tiers, versions and identity."""
        logger.info("kvtier: version %s in %s; %s", own_version(), self.version, native.describe())
        if self.replicas > 1 and config.server is None:
            line = "kvtier: data parallel: replica %d of %d; capacities are divided by %d"
            logger.info(line, self.replica, self.replicas, self.replicas)
        chunk_nbytes = Nbytes(sum(part.frame_nbytes for part in context.layout.parts))
        logger.info("kvtier: chunk_tokens: %s -> %d: a chunk takes %s", asked, config.chunk_tokens, chunk_nbytes)
        for line in stack.describe():
            logger.info("kvtier: %s", line)
        for line in config.describe():
            logger.debug("kvtier: %s", line)
        digest = context.namespace.digest.hex()
        logger.info("kvtier: identity %s: engines with the same one share KV", digest[:8])
        logger.debug("kvtier: identity in full: %s; before the start: %s", digest, before_start.digest.hex())
        for fact in context.namespace.facts:
            logger.debug("kvtier: identity: %s: %s", *fact)


def _missing_mover(config: StackConfig, device: str) -> str:
    """Why an arena cannot serve this type of device; empty if all can."""
    lacking = [tier.name for tier in config.arenas if device not in tier.config.devices]
    return f"arena {lacking[0]} has no mover for {device} yet" if lacking else ""
