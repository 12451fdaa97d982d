"""Arranges the KV of blended requests in a worker, once their chunks are loaded."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterable, Mapping

import attrs
import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults

from kvtier_blend import model_check
from kvtier_blend.link_pass import LinkPass
from kvtier_blend.messages import Order
from kvtier_blend.pages import TokenPages
from kvtier_blend.rotation import Rotation
from kvtier_core.layouts import ChunkLayout
from kvtier_core.outside import printable
from kvtier_core.work.io_pool import run

logger = logging.getLogger("kvtier")


def _refusal(config: VllmConfig) -> str:
    """Why an engine with this configuration cannot blend; empty if its own test decides."""
    parallel = config.parallel_config
    refusals = {
        "it has several ranks": parallel.world_size_across_dp > 1,
        "it computes drafts": config.speculative_config is not None,
        "it has adapters": config.lora_config is not None,
        "it takes items beside text": config.model_config.is_multimodal_model,
    }
    return next((why for why, holds in refusals.items() if holds), "")


@attrs.define
class _Begun:
    order: Order
    waiting: set[str]  #: loads that have not ended
    failed: bool = False


class Arranger:
    """Moves chunks to their places, turns their keys, and has the model compute the gaps between them.

    Call every method on the thread that enqueues the engine's forwards.
    """

    def __init__(self, config: VllmConfig, runner: object, caches: Mapping[str, torch.Tensor], layout: ChunkLayout):
        """``runner`` is vLLM's model runner. Raises ValueError if this engine cannot blend, and why."""
        if why := _refusal(config):
            raise ValueError(why)
        if runner is None:
            raise ValueError("its model runner is of an unknown form")
        self._pages = TokenPages(caches, layout)
        self._link = LinkPass(runner, config)
        self._device = next(iter(caches.values())).device
        self._rotation = Rotation(self._link.model, config.model_config.max_model_len, self._device)
        self._chunk_tokens = layout.tokens
        self._begun: dict[str, _Begun] = {}  # by request
        if why := model_check.fault(self._link, self._rotation, self._pages, config.model_config.max_model_len):
            raise ValueError(why)

    def begin(self, orders: Iterable[Order]) -> None:
        """The loads of these requests begin in this step."""
        self._begun |= {order.request_id: _Begun(order, set(order.loads)) for order in orders}

    def results(self, loads: KVConnectorTransferResults) -> KVConnectorTransferResults:
        """Arrange the requests of which all loads have ended. Returns ``loads`` with requests in place of loads."""
        ended, failed = set(loads.finished_recving or ()), set(loads.failed_recving or ())
        for request_id, begun in list(self._begun.items()):
            now = ended & begun.waiting
            begun.failed |= not failed.isdisjoint(now)
            begun.waiting -= now
            ended -= now
            failed -= now
            if begun.waiting:
                continue
            del self._begun[request_id]
            ended.add(request_id)
            if begun.failed or not self._has_arranged(begun.order):
                failed.add(request_id)
        return dataclasses.replace(loads, finished_recving=ended, failed_recving=failed)

    def _has_arranged(self, order: Order) -> bool:
        """Arrange the KV of a request. False if that failed: then the engine computes all of it."""
        error = run(lambda: self._arrange(order)).error
        if error is not None:
            why = f"{type(error).__name__}: {error}"
            logger.warning("kvtier: %s is computed: blending it failed: %s", printable(order.request_id), why)
        return error is None

    def _arrange(self, order: Order) -> None:
        blocks = torch.tensor(order.blocks, device=self._device)
        offsets = torch.arange(self._chunk_tokens)
        new = torch.cat([at + offsets for at, _ in order.chunks])
        old = torch.cat([was + offsets for _, was in order.chunks])
        loaded = order.start + torch.arange(len(new))
        kept = new < order.end
        new, old, loaded = (each[kept].to(self._device) for each in (new, old, loaded))
        here, there = self._pages.find(blocks, new), self._pages.find(blocks, loaded)
        for keys, values in self._pages.layers.values():
            turned, moved = self._rotation.turn(keys[there], old, new), values[there]
            keys[here], values[here] = turned, moved
        self._link.compute(order.tokens, order.runs, order.blocks)
