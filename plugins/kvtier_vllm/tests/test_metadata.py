"""The envelopes in which vLLM carries kvtier's messages between its processes."""

from __future__ import annotations

from collections import Counter
from multiprocessing.reduction import ForkingPickler

from kvtier_core.engine.messages import StepPlan, Transfer, WorkerProgress
from kvtier_core.types import Slot
from kvtier_vllm.steps import StepPlanMetadata, WorkerProgressMetadata

PLAN = StepPlan(
    arenas=("a handle",),
    self_test_slots=(Slot(0, 7),),
    loads=(("request", Transfer((Slot(0, 1),), ((3, -1),))),),
    stores=((1, Transfer((Slot(0, 2),), ((4, 5),))),),
    stores_to_fence=(1,),
    failed_loads=("other",),
    epoch=2,
)


def test_a_plan_arrives_as_it_was_sent():
    """vLLM pickles it, as it does all connectors' metadata."""
    assert ForkingPickler.loads(ForkingPickler.dumps(StepPlanMetadata(PLAN))) == StepPlanMetadata(PLAN)


def test_reports_of_the_ranks_are_added_up():
    ranks = [
        WorkerProgress(
            Counter({1: 1, 2: 1}),
            Counter({2: rank}),
            Counter({"": 1}),
            {(1, rank): (11 + rank,)},
            {1: 5 - rank, rank: 3},
            changed={rank: f"rank {rank}"},
            off=f"rank {rank}" * rank,
        )
        for rank in range(2)
    ]
    first, second = (ForkingPickler.loads(ForkingPickler.dumps(WorkerProgressMetadata(each))) for each in ranks)
    assert first.aggregate(second).progress == WorkerProgress(
        Counter({1: 2, 2: 2}),
        Counter({2: 1}),
        Counter({"": 2}),
        {(1, 0): (11,), (1, 1): (12,)},
        {0: 3, 1: 3},
        changed={0: "rank 0", 1: "rank 1"},
        off="rank 1",
    )
