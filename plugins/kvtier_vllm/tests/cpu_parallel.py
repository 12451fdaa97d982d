"""What vLLM's CPU build lacks for two kinds of parallelism, added from outside so that tests can run them.

None of it touches pages, block tables or connectors: those are vLLM's own.
"""

from __future__ import annotations

import torch


def let_experts_exchange() -> None:
    """Ranks of a model with experts gather each other's tokens; the CPU communicator has no such collectives.

    With expert parallelism a rank has some of the experts, by numbers of its own; the CPU kernel takes only those.
    """
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    CpuCommunicator.all_gatherv = _all_gatherv
    CpuCommunicator.reduce_scatterv = _reduce_scatterv
    apply = CPUUnquantizedExperts.apply

    def apply_to_own(self, *, topk_ids, topk_weights, expert_map, **more):
        if expert_map is not None:
            own = expert_map[topk_ids.long()]
            topk_weights = topk_weights * (own >= 0)
            topk_ids = own.clamp(min=0).to(topk_ids.dtype)
        apply(self, topk_ids=topk_ids, topk_weights=topk_weights, expert_map=expert_map, **more)

    CPUUnquantizedExperts.apply = apply_to_own


def _all_gatherv(self, input_, dim=0, sizes=None):
    """What every rank has, rank after rank; ``sizes`` are the rows of each."""
    assert dim == 0
    if not isinstance(input_, torch.Tensor):
        return [_all_gatherv(self, each, dim, sizes) for each in input_]
    sizes = sizes or [len(input_)] * self.world_size
    parts = [input_.contiguous() if at == self.rank_in_group else None for at in range(self.world_size)]
    for at, rows in enumerate(sizes):
        if parts[at] is None:
            parts[at] = input_.new_empty(rows, *input_.shape[1:])
        torch.distributed.broadcast(parts[at], self.ranks[at], group=self.device_group)
    return torch.cat(parts)


def _reduce_scatterv(self, input_, dim=0, sizes=None):
    """This rank's rows of the sum over all ranks."""
    assert dim == 0
    whole = input_.contiguous().clone()
    torch.distributed.all_reduce(whole, group=self.device_group)
    sizes = sizes or [len(whole) // self.world_size] * self.world_size
    return whole.split(sizes)[self.rank_in_group].clone()


def let_stages_receive() -> None:
    """A later pipeline stage receives into buffers that vLLM makes in a dummy run, which the CPU worker leaves out."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    gather = GPUModelRunner.sync_and_gather_intermediate_tensors

    def gather_with_buffers(self, *arguments):
        if self.intermediate_tensors is None:
            self.intermediate_tensors = self.model.make_empty_intermediate_tensors(
                batch_size=self.max_num_tokens, dtype=self.model_config.dtype, device=self.device
            )
        return gather(self, *arguments)

    GPUModelRunner.sync_and_gather_intermediate_tensors = gather_with_buffers
