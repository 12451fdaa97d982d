"""Computes some tokens of a prompt among KV that is there already, by a forward of the engine's own model."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.forward_context import set_forward_context
from vllm.v1.attention.backend import CommonAttentionMetadata


class LinkPass:
    """Runs of tokens of one request, each as a request of its own over the same blocks.

    So what a token attends to, in which kernel and in which order, is decided by the engine's own code.
    """

    def __init__(self, runner: Any, config: VllmConfig):
        """``runner`` is vLLM's model runner."""
        self.model = runner.get_model()
        self._runner, self._config = runner, config
        self._block_tokens = config.cache_config.block_size
        scheduler = config.scheduler_config
        self._most_tokens, self._most_runs = scheduler.max_num_batched_tokens, scheduler.max_num_seqs

    def compute(
        self, tokens: Sequence[int], runs: Sequence[tuple[int, int]], blocks: Sequence[int], shift: int = 0
    ) -> None:
        """Compute the KV of these ``tokens``, which are those of the ``runs`` in order, into ``blocks``.

        A run attends to everything before it. A model is told positions that are greater by ``shift``.
        """
        given = iter(tokens)
        for batch in self._batches(runs):
            count = sum(end - begin for begin, end in batch)
            self._forward([next(given) for _ in range(count)], batch, blocks, shift)

    def _batches(self, runs: Sequence[tuple[int, int]]) -> Iterator[list[tuple[int, int]]]:
        """The runs in forwards that are no larger than the engine's own, in order: later ones see earlier ones."""
        batch: list[tuple[int, int]] = []
        room = self._most_tokens
        for begin, end in runs:
            while begin < end:
                stop = min(end, begin + room)
                batch.append((begin, stop))
                room -= stop - begin
                begin = stop
                if not room or len(batch) == self._most_runs:
                    yield batch
                    batch, room = [], self._most_tokens
        if batch:
            yield batch

    def _forward(
        self, tokens: Sequence[int], runs: Sequence[tuple[int, int]], blocks: Sequence[int], shift: int
    ) -> None:
        device, size = self._runner.device, self._block_tokens
        places = torch.cat([torch.arange(begin, end) for begin, end in runs])
        table = torch.tensor(blocks, dtype=torch.int32)
        lengths = [end - begin for begin, end in runs]
        starts = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        ends = torch.tensor([end for _, end in runs], dtype=torch.int32)
        common = CommonAttentionMetadata(
            query_start_loc=starts.to(device),
            query_start_loc_cpu=starts,
            seq_lens=ends.to(device),
            seq_lens_cpu_upper_bound=ends,
            num_reqs=len(runs),
            num_actual_tokens=len(places),
            max_query_len=max(lengths),
            max_seq_len=max(end for _, end in runs),
            block_table_tensor=table.repeat(len(runs), 1).to(device),
            slot_mapping=(table.long()[places // size] * size + places % size).to(device),
            causal=True,
            is_prefilling=torch.ones(len(runs), dtype=torch.bool),
            positions=places.to(device),
        )
        metadata: dict[str, Any] = {}
        slots: dict[str, torch.Tensor] = {}
        for group in (group for groups in self._runner.attn_groups for group in groups):
            built = group.build_metadata(common)
            metadata |= dict.fromkeys(group.layer_names, built)
            slots |= dict.fromkeys(group.layer_names, common.slot_mapping)
        with (
            torch.inference_mode(),
            set_forward_context(metadata, self._config, num_tokens=len(places), slot_mapping=slots),
        ):
            self.model(
                input_ids=torch.tensor(tokens, dtype=torch.int32, device=device),
                positions=(places + shift).to(device),
                intermediate_tensors=None,
                inputs_embeds=None,
            )


def runner_of_caller() -> Any:
    """The model runner that calls its connector; None if it has another form. vLLM hands over none."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame:
        runner = frame.f_locals.get("self")
        if hasattr(runner, "attn_groups") and hasattr(runner, "get_model"):
            return runner
        frame = frame.f_back
    return None
