"""Real vLLM in this process, when something goes wrong: the answer stays right and serving goes on."""

from __future__ import annotations

import fcntl
import os
import random
import shutil
import threading

import pytest
from chunk_files import chunk_files
from real_engines import cpu, cpu_and_disk, hit, miss, prompt
from sizes import some
from test_serving import NOISE

from kvtier_core.engine.scheduler.side import SchedulerSide
from kvtier_core.engine.worker.side import WorkerSide
from kvtier_core.stack.manager import StorageManager
from kvtier_core.transfer.host_mover import HostMover


@pytest.fixture(scope="module")
def asked():
    return prompt(50, 530)


@pytest.fixture(scope="module")
def truth(model, asked):
    from real_engines import Engine

    plain = Engine(model, None)
    answer = plain.ask(asked)[0]
    plain.close()
    return answer


@pytest.mark.more
def test_aborts_at_every_moment_leave_nothing_behind(engine, tmp_path):
    from vllm import SamplingParams

    drawn = random.Random(1)
    shared = prompt(51, 384)
    with engine(cpu_and_disk(tmp_path), max_num_batched_tokens=256, max_num_seqs=4) as served:
        llm = served.llm.llm_engine
        served.ask(prompt(52, 500, shared))
        for i in range(60):
            ids = [str(100 * i + j) for j in range(3)]
            for request_id in ids:
                tokens = prompt(drawn.randrange(8), drawn.choice([70, 400, 600]), drawn.choice([shared, []])[:64])
                llm.add_request(
                    request_id,
                    {"prompt_token_ids": tokens},
                    SamplingParams(temperature=0, max_tokens=3, detokenize=False, ignore_eos=True),
                )
            for _ in range(i % 7):
                llm.step()
            llm.abort_request(drawn.sample(ids, 2))
            if i % 5 == 0:
                served.connector.side.invalidate_all()
        while llm.has_unfinished_requests():
            llm.step()
        while served.scheduler.has_requests():
            llm.engine_core.engine_core.step()
        served.assert_at_rest()
        assert served.connector.side is not None


def test_a_load_that_fails_is_recomputed(engine, monkeypatch, asked, truth):
    with engine(cpu()) as served:
        served.ask(asked)
        served.outcomes()
        monkeypatch.setattr(HostMover, "load", lambda self, *job: 1 / 0)
        again = served.ask(asked)[0]
        assert served.outcomes() == [hit(530, cpu=512), miss(530, "its load failed")]
        served.assert_at_rest()
        monkeypatch.undo()
        assert served.ask(asked)[0].cached == 512
    assert again.differs(truth) < NOISE


def test_a_store_that_fails_is_forgotten(engine, monkeypatch, asked, truth):
    with engine(cpu()) as served:
        served.ask(prompt(53, 100))
        monkeypatch.setattr(HostMover, "store", lambda self, job, pages, slots: 1 / 0)
        served.ask(asked)
        monkeypatch.undo()
        again = served.ask(asked)[0]
        assert again.cached == 0
        assert served.ask(asked)[0].cached == 512
        served.assert_at_rest()
    assert again.differs(truth) < NOISE


@pytest.mark.parametrize("method", ["match", "admitted", "plan", "progress", "finished"])
def test_a_bug_in_the_schedulers_half_costs_only_the_cache(engine, said, monkeypatch, asked, truth, method):
    with engine(cpu()) as served:
        served.ask(asked)
        monkeypatch.setattr(SchedulerSide, method, lambda self, *args, **options: 1 / 0)
        again = [served.ask(asked)[0], served.ask(asked)[0]]
        assert any("continues without kvtier" in line for line in said())
    assert max(answer.differs(truth) for answer in again) < NOISE


@pytest.mark.parametrize("method", ["load", "store", "loaded", "progress"])
def test_a_bug_in_a_workers_half_costs_only_the_cache(engine, said, monkeypatch, asked, truth, method):
    with engine(cpu()) as served:
        served.ask(asked)
        monkeypatch.setattr(WorkerSide, method, lambda self, *args, **options: 1 / 0)
        again = [served.ask(asked)[0], served.ask(asked)[0]]
        assert any("continues without kvtier" in line for line in said())
    assert max(answer.differs(truth) for answer in again) < NOISE


@pytest.mark.parametrize("method", ["plan", "match"])
def test_a_schedulers_half_that_failed_lets_go_of_its_stack(engine, monkeypatch, tmp_path, asked, truth, method):
    others = set(threading.enumerate())
    with engine(cpu_and_disk(tmp_path)) as served:
        served.ask(asked)
        threads, locked = held(tmp_path, others)
        assert threads and locked
        monkeypatch.setattr(SchedulerSide, method, lambda self, *args, **options: 1 / 0)
        again = served.ask(asked)[0]
        assert held(tmp_path, others) == (set(), False)
    assert again.differs(truth) < NOISE


def test_a_stack_that_raises_is_released_nevertheless(engine, monkeypatch, tmp_path, asked, truth):
    """In its last steps, too."""
    others = set(threading.enumerate())
    with engine(cpu_and_disk(tmp_path)) as served:
        served.ask(asked)
        monkeypatch.setattr(StorageManager, "step", lambda self: 1 / 0)
        again = served.ask(asked)[0]
        assert held(tmp_path, others) == (set(), False)
    assert again.differs(truth) < NOISE


def held(path, others):
    """The threads of the stack in this process, which are none of the others, and whether its folder is locked."""
    names = {each.name for each in set(threading.enumerate()) - others}
    threads = {name for name in names if name.startswith(("kvtier-seal", "kvtier-disk"))}
    lock = os.open(path / ".kvtier-lock", os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return threads, True
    finally:
        os.close(lock)
    return threads, False


@pytest.mark.parametrize("policy", some(["recompute", "fail"]))
@pytest.mark.parametrize("method", ["load", "store", "loaded", "progress", "fence"])
def test_no_lookup_or_reservation_after_a_worker_has_failed(engine, monkeypatch, asked, truth, method, policy):
    """Whatever vLLM does with requests whose load fails: none is expected any more."""
    from vllm.config import KVTransferConfig

    transfer = KVTransferConfig(
        kv_connector="KVTierConnector",
        kv_role="kv_both",
        kv_load_failure_policy=policy,
        kv_connector_extra_config=cpu(),
    )
    with engine(cpu(), kv_transfer_config=transfer) as served:
        served.ask(asked)
        served.settle()
        monkeypatch.setattr(WorkerSide, method, lambda self, *args, **options: 1 / 0)
        served.ask(prompt(54, 530))  # fails, if it stores
        served.outcomes()
        again = [*served.ask(asked), *served.ask(prompt(55, 530)), *served.ask(asked)]
        assert served.outcomes() == [miss(530, "rank 0 failed; see its log")] * 3
        served.assert_at_rest()
    assert max(answer.differs(truth) for answer in (again[0], again[2])) < NOISE


def spoil_a_byte(path):
    for file in chunk_files(path):
        frame = bytearray(file.read_bytes())
        frame[len(frame) // 2] ^= 1
        file.write_bytes(frame)


def swap_files(path):
    first, second, *_ = chunk_files(path)
    a, b = first.read_bytes(), second.read_bytes()
    first.write_bytes(b)
    second.write_bytes(a)


def cut_files(path):
    for file in chunk_files(path):
        file.write_bytes(file.read_bytes()[:8192])


def remove_everything(path):
    shutil.rmtree(path)


@pytest.mark.parametrize(
    "harm", some([spoil_a_byte, swap_files, cut_files, remove_everything], spoil_a_byte, swap_files)
)
def test_a_disk_that_lies_is_never_believed(engine, said, tmp_path, asked, truth, harm):
    store = tmp_path / "store"
    with engine(cpu_and_disk(store)) as served:
        served.ask(asked)
    with engine(cpu_and_disk(store)) as served:
        harm(store)  # behind the back of an engine that has seen the files
        again = served.ask(asked)[0]
        assert again.cached < 512
        assert served.ask(asked)[0].cached == 512  # stored anew, in memory at least
        served.assert_at_rest()
        assert any("corrupt" in line or "missing" in line for line in said())
    assert again.differs(truth) < NOISE
