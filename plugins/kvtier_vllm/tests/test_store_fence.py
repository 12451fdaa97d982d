"""Stores that read their pages late, as a GPU's do: the engine gives the blocks away, and the step is fenced."""

from __future__ import annotations

from typing import ClassVar

import pytest
from real_engines import BLOCK, Engine, cpu, prompt
from test_serving import NOISE

from kvtier_core.transfer import movers
from kvtier_core.transfer.host_mover import HostMover

#: Two of them fill the engine, so that the blocks of one are soon another's.
PROMPTS = [prompt(500 + i, 8 * BLOCK + 2) for i in range(12)]
OPTIONS = {"num_gpu_blocks_override": 20, "max_num_seqs": 2, "max_model_len": 512}
LOOKS = 12  # after so many a store reads its pages; a step looks twice


def blocks_of(pages):
    return {block for chunk in pages for group in chunk for block in group}


class LateStores(HostMover):
    """Reads the pages of a store some steps after it was begun, unless it has to be sooner."""

    fenced: ClassVar[int] = 0

    def __init__(self, *args):
        super().__init__(*args)
        self.held = {}  # arguments and looks to go, by job

    def store(self, job, pages, slots):
        self.held[job] = [(job, pages, slots), LOOKS]

    def load(self, job, slots, pages, after=None):
        written = blocks_of(pages)
        self.read([number for number, ((_, read, _), _) in self.held.items() if written & blocks_of(read)])
        super().load(job, slots, pages, after)

    def finished(self):
        for entry in self.held.values():
            entry[1] -= 1
        self.read([job for job, (_, looks) in self.held.items() if looks < 0])
        return super().finished()

    def wait(self, jobs, *args):
        self.read(jobs)
        super().wait(jobs, *args)

    def fence(self, jobs):
        LateStores.fenced += len(self.held.keys() & jobs)
        self.read(jobs)

    def read(self, jobs):
        for job in jobs:
            if job in self.held:
                super().store(*self.held.pop(job)[0])


class WithoutFence(LateStores):
    def fence(self, jobs):
        pass


@pytest.fixture(scope="module")
def truth(model):
    plain = Engine(model, None, **OPTIONS)
    answers = [plain.ask(each)[0] for each in PROMPTS]
    plain.close()
    return answers


def worst(engine, monkeypatch, truth, mover):
    """The largest difference from the truth of an answer that stands on what was stored."""
    monkeypatch.setattr(movers, "HostMover", mover)
    LateStores.fenced = 0
    with engine(cpu(), **OPTIONS) as served:
        cold = served.ask(*PROMPTS)
        assert max(a.differs(t) for a, t in zip(cold, truth, strict=True)) < NOISE
        warm = served.ask(*PROMPTS)
        served.assert_at_rest()
    assert sum(answer.cached for answer in warm) > len(PROMPTS) * 6 * BLOCK
    return max(a.differs(t) for a, t in zip(warm, truth, strict=True))


def test_the_engine_overtakes_no_store(engine, monkeypatch, truth):
    assert worst(engine, monkeypatch, truth, LateStores) < NOISE
    assert LateStores.fenced > 3


def test_without_the_fence_it_would(engine, monkeypatch, truth):
    assert worst(engine, monkeypatch, truth, WithoutFence) > NOISE
