"""vLLM's tiered offloading on a machine without a GPU: all of it is vLLM's own, but for the copies of a worker.

`CPUOffloadingWorker` copies between a GPU and the host's memory in streams. Here the blocks lie in memory too.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.kv_offload.base import CanonicalKVCaches, OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


class TieringOnTheCPU(TieringOffloadingSpec):
    """vLLM makes it by ``spec_name`` and ``spec_module_path``."""

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        self._worker = self._worker or Copies(self, kv_caches)
        return self._worker


class Copies(OffloadingWorker):
    """A chunk is a row of the region: of each tensor the pages of its blocks, block after block."""

    def __init__(self, spec: TieringOffloadingSpec, kv_caches: CanonicalKVCaches):
        assert len(kv_caches.group_data_refs) == 1, "one group of layers"
        self._blocks = spec.blocks_per_chunk
        self._region = SharedOffloadRegion(
            engine_id=spec._engine_id,
            num_chunks=spec.num_chunks,
            rank=0,
            kv_bytes_per_chunk=spec.kv_bytes_per_chunk,
            cpu_page_size=spec.cpu_page_size_per_worker,
        )
        sizes = [each.page_size_bytes for each in kv_caches.tensors]
        self._host = [self._region.create_next_worker_view(size * self._blocks) for size in sizes]
        tensors = [each.tensor.view(torch.int8) for each in kv_caches.tensors]
        self._device = [each.view((-1, size)) for each, size in zip(tensors, sizes, strict=True)]
        self._ended: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        for host, device in self._pages(dst_spec, src_spec):
            host.copy_(device)
        return self._end(job_id)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        for host, device in self._pages(src_spec, dst_spec):
            device.copy_(host)
        return self._end(job_id)

    def _pages(self, host: Any, device: Any) -> Any:
        """The places of each block: as `CPUOffloadingWorker` has them."""
        first = device.block_indices[0]
        for number, block in enumerate(device.block_ids, first % self._blocks):
            chunk, part = divmod(number, self._blocks)
            for of_host, of_device in zip(self._host, self._device, strict=True):
                page = of_device[block]
                begin = part * len(page)
                yield of_host[host.chunk_ids[chunk], begin : begin + len(page)], page

    def _end(self, job_id: int) -> bool:
        self._ended.append(TransferResult(job_id, True))
        return True

    def get_finished(self) -> list[TransferResult]:
        ended, self._ended = self._ended, []
        return ended

    def wait(self, job_ids: set[int]) -> None:
        pass

    def shutdown(self) -> None:
        self._host.clear()
        self._region.cleanup()
