"""kvtier beside other connectors, in vLLM's MultiConnector: what they loaded is theirs, and so is what stands on it."""

from __future__ import annotations

import json
import os
import time

import attrs
import pytest
from real_engines import BLOCK, cpu, cpu_and_disk, prompt
from test_serving import NOISE, forget
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorTransferResults,
    SupportsHMA,
)

from kvtier_core.engine.messages import WorkerReport
from kvtier_core.engine.worker import side as worker
from kvtier_testing.samples import make_group
from kvtier_vllm import worker_reports as reports

pytestmark = pytest.mark.usefixtures("runtime")

#: What a neighbour claims to have of its prompts.
CLAIMED = 256


@attrs.define(slots=False)
class Loads(KVConnectorMetadata):
    """Block ids by request."""

    blocks: dict[str, list[int]] = attrs.field(factory=dict)
    accused: set[int] = attrs.field(factory=set)


class Neighbour(KVConnectorBase_V1, SupportsHMA):
    """Loads garbage for the first tokens of each prompt that begins with its ``mark``; ``kind`` says how.

    "sync, by block" and "async, by request" report every load as failed, "sync" and "async" never do, and "accuser"
    loads nothing and reports blocks that the engine has just computed.
    """

    def __init__(self, config, role, kv_cache_config):
        super().__init__(config, role, kv_cache_config)
        options = self._kv_transfer_config.kv_connector_extra_config
        self.mark, self.kind = options["mark"], options["kind"]
        self.asked: set[str] = set()
        self.loads = Loads()
        self.received: set[str] = set()
        self.bad: set[int] = set()

    # -- scheduler

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        again = request.request_id in self.asked and not self.kind.startswith("sync")
        if request.prompt_token_ids[0] != self.mark or self.kind == "accuser" or again:
            return 0, False
        return max(0, CLAIMED - num_computed_tokens), self.kind.startswith("async")

    def update_state_after_alloc(self, request, blocks, num_external_tokens):
        ids = blocks.get_block_ids()[0]
        if num_external_tokens:
            self.asked.add(request.request_id)
            self.loads.blocks[request.request_id] = ids[: CLAIMED // BLOCK][-num_external_tokens // BLOCK :]
        elif (
            request.prompt_token_ids[0] == self.mark and self.kind == "accuser" and request.request_id not in self.asked
        ):
            self.asked.add(request.request_id)
            self.loads.accused.update(ids[:1])

    def build_connector_meta(self, scheduler_output):
        loads, self.loads = self.loads, Loads()
        return loads

    # -- worker

    def register_kv_caches(self, kv_caches):
        self.caches = kv_caches

    def start_load_kv(self, forward_context, **kwargs):
        loads = self._connector_metadata
        for request_id, blocks in loads.blocks.items():
            for cache in self.caches.values():
                cache[blocks] = 0.25
            if self.kind.startswith("async"):
                self.received.add(request_id)
            if self.kind == "sync, by block":
                self.bad.update(blocks)
        self.bad |= loads.accused

    def get_transfer_results(self, finished_req_ids):
        received, self.received = self.received, set()
        return KVConnectorTransferResults(
            finished_recving=received, failed_recving=set(received) if self.kind == "async, by request" else set()
        )

    def get_block_ids_with_load_errors(self):
        bad, self.bad = self.bad, set()
        return bad

    def request_finished_all_groups(self, request, block_ids):
        return False, None

    def wait_for_layer_load(self, layer_name): ...
    def save_kv_layer(self, layer_name, kv_layer, attn_metadata, **kwargs): ...
    def wait_for_save(self): ...


@attrs.define(slots=False)
class Handshake(KVConnectorHandshakeMetadata):
    """Not kvtier's."""


class Shaker(Neighbour):
    """Exchanges metadata of its own type at start-up and takes no other, as NixlConnector does."""

    shaken = 0

    def get_handshake_metadata(self):
        return Handshake()

    def set_xfer_handshake_metadata_pp_aware(self, metadata):
        if not all(isinstance(each, Handshake) for each in metadata.values()):
            raise ValueError("NixlConnector: foreign handshake metadata")
        Shaker.shaken += 1


def neighbour(kind, mark, name="Neighbour"):
    return {
        "kv_connector": name,
        "kv_connector_module_path": __name__,
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"kind": kind, "mark": mark},
    }


def kvtier(stack, **options):
    return {"kv_connector": "KVTierConnector", "kv_role": "kv_both", "kv_connector_extra_config": stack, **options}


def other(name, role="kv_both", **options):
    return {"kv_connector": name, "kv_role": role, "kv_connector_extra_config": options}


def together(*connectors, policy="recompute"):
    """Options of an engine with these connectors, the first one asked first."""
    return {
        "kv_transfer_config": KVTransferConfig(
            kv_connector="MultiConnector",
            kv_role="kv_both",
            kv_load_failure_policy=policy,
            kv_connector_extra_config={"connectors": list(connectors)},
        )
    }


#: Neighbours by their marks; nobody claims prompts that begin with 9.
KINDS = {1: "sync, by block", 2: "sync", 3: "async, by request", 4: "async", 5: "accuser"}
#: Those whose loads are found to be bad, so that vLLM itself puts it right.
MENDED = (1, 3, 5, 9)
#: Those of which kvtier stores what the engine computes in the end.
STORED = (1, 3, 9)


def asked_of(mark):
    """A prompt, and one that goes on where its first half ends."""
    first = [mark, *prompt(100 + mark, 529)]
    return first, [*first[:384], *prompt(200 + mark, 300)]


@pytest.fixture(scope="module")
def truth(model):
    """What an engine without connectors says, in the same order."""
    from real_engines import Engine

    plain = Engine(model, None)
    answers = {mark: [plain.ask(each)[0] for each in asked_of(mark)] for mark in (*KINDS, 9)}
    plain.close()
    return answers


@pytest.mark.parametrize("ours_first, prefix_caching", [(False, True), (True, False)])
def test_kv_loaded_by_other_connectors_is_not_stored_nor_anything_after_it(
    engine, truth, tmp_path, ours_first, prefix_caching
):
    stack = cpu_and_disk(tmp_path / "store")
    others = [neighbour(kind, mark) for mark, kind in KINDS.items()]
    connectors = [kvtier(stack), *others] if ours_first else [*others, kvtier(stack)]
    # So few blocks that each is given to one request after the other.
    few = {"num_gpu_blocks_override": 40, "max_model_len": 1024}
    with engine(**together(*connectors), enable_prefix_caching=prefix_caching, **few) as served:
        for seed in range(300, 305):  # of 16 whole blocks each: every block has been kvtier's to store once
            served.ask([9, *prompt(seed, 511)], tokens=1)
        for mark in (2, 9, 1, 3, 4, 5):
            first, second = asked_of(mark)
            answers = [served.ask(each)[0] for each in (first, first, second)]
            if mark in MENDED:
                right = truth[mark]
                assert max(a.differs(t) for a, t in zip(answers, (right[0], *right), strict=True)) < NOISE
        served.assert_at_rest()
    with engine(stack, max_model_len=1024) as alone:
        for mark, right in truth.items():
            answers = [alone.ask(each)[0] for each in asked_of(mark)]
            assert max(a.differs(t) for a, t in zip(answers, right, strict=True)) < NOISE, KINDS.get(mark)
            if mark == 5 and prefix_caching:  # vLLM computed it again the second time, and that was stored
                continue
            # The second prompt goes on where 384 tokens of the first, just stored, end.
            assert [answer.cached for answer in answers] == ([512, 640] if mark in STORED else [0, 384]), mark


def served_and_exact(served, truth, *, mark=9):
    """The same prompt twice, of which kvtier has the second."""
    right = truth[mark][0]
    cold, warm = (served.ask(asked_of(mark)[0])[0] for _ in range(2))
    assert (cold.cached, warm.cached) == (0, 512)
    assert max(cold.differs(right), warm.differs(right)) < NOISE
    served.assert_at_rest()


def warnings(lines):
    return [line for line in lines if "kv_load_failure_policy" in line]


def test_another_connector_may_exchange_handshakes_in_front_of_kvtier(engine, truth, said, runtime, monkeypatch):
    order = []
    tried, loads = worker.try_copies, Shaker.start_load_kv
    monkeypatch.setattr(worker, "try_copies", lambda *args: order.append("kvtier tries pages") or tried(*args))
    monkeypatch.setattr(Shaker, "start_load_kv", lambda *args: order.append("the other loads") or loads(*args))
    before = Shaker.shaken
    with engine(**together(neighbour("sync", 1, "Shaker"), kvtier(cpu(), kv_load_failure_policy="fail"))) as served:
        assert (Shaker.shaken, list(runtime.glob("*.report"))) == (before + 1, [])
        served_and_exact(served, truth)
    assert order[0] == "kvtier tries pages"
    assert not warnings(said())  # what is set inside the MultiConnector does not count


def test_another_connector_may_exchange_handshakes_after_kvtier(engine, truth, said, runtime):
    before = Shaker.shaken
    inner = kvtier(cpu(), kv_load_failure_policy="recompute")
    with engine(**together(inner, neighbour("sync", 1, "Shaker"), policy="fail")) as served:
        assert (Shaker.shaken, list(runtime.glob("*.report"))) == (before + 1, [])
        served.connector.set_xfer_handshake_metadata_pp_aware({(1, 0): Handshake()})
        assert warnings(said()) == [
            "kvtier: kv_load_failure_policy is 'fail': a request whose load fails will fail. "
            "Set it to 'recompute' (around a MultiConnector, not inside it)."
        ]
        served_and_exact(served, truth)


@pytest.mark.parametrize("ours_first", [False, True])
def test_answers_are_exact_beside_nixl(engine, truth, ours_first):
    pytest.importorskip("nixl", reason="NIXL is not installed: pip install nixl-cu13 nixl")
    connectors = [kvtier(cpu()), other("NixlConnector")]
    with engine(**together(*connectors if ours_first else connectors[::-1])) as served:
        served_and_exact(served, truth)


@pytest.mark.parametrize("ours_first", [False, True])
def test_answers_are_exact_beside_vllms_example_connector(engine, truth, tmp_path, ours_first):
    """Which answers the second time depends on the order; in the first order it is not kvtier."""
    stack = cpu_and_disk(tmp_path / "store")
    example = other("ExampleConnector", shared_storage_path=str(tmp_path / "example"))
    connectors = [kvtier(stack), example] if ours_first else [example, kvtier(stack)]
    with engine(**together(*connectors)) as served:
        served_and_exact(served, truth)
        assert served.manager.usage()[0].chunks == 8
    with engine(stack) as alone:
        warm = alone.ask(asked_of(9)[0])[0]
        assert (warm.cached, warm.differs(truth[9][0]) < NOISE) == (512, True)


def test_beside_others_kvtier_leaves_words_about_prefill_and_decode_to_them(engine):
    """vLLM ends if two connectors answer to them."""
    with engine(**together(kvtier(cpu()), kvtier(cpu()))) as served:
        served.ask(asked_of(9)[0], tokens=1, parameters={"do_remote_decode": True})
        assert served.parameters is None
        served.assert_at_rest()


def test_two_kvtiers_with_a_disk_each(engine, truth, tmp_path, runtime):
    stacks = [cpu_and_disk(tmp_path / name) for name in ("one", "two")]
    with engine(**together(*map(kvtier, stacks))) as served:
        assert list(runtime.glob("*.report")) == []
        served_and_exact(served, truth)
    with engine(stacks[1]) as alone:
        warm = alone.ask(asked_of(9)[0])[0]
        assert (warm.cached, warm.differs(truth[9][0]) < NOISE) == (512, True)


def test_the_loads_of_one_kvtier_begin_after_the_fences_of_both(engine, truth, monkeypatch):
    """The second one stores from blocks that the first one may load into."""
    order = []
    for name in ("fence", "mark", "load"):
        method = getattr(worker.WorkerSide, name)
        monkeypatch.setattr(
            worker.WorkerSide,
            name,
            lambda *args, name=name, method=method, **more: order.append(name) or method(*args, **more),
        )
    with engine(**together(kvtier(cpu()), kvtier(cpu()))) as served:
        served_and_exact(served, truth)
    step = ["fence", "fence", "mark", "mark", "load", "load"]
    assert order == step * (len(order) // len(step)) != []


def test_kv_invented_by_another_connector_is_not_stored(engine, truth, tmp_path):
    """DecodeBenchConnector fills the pages of whatever prompt with a constant."""
    stack = cpu_and_disk(tmp_path / "store")
    with engine(**together(kvtier(stack), other("DecodeBenchConnector")), enable_prefix_caching=True) as served:
        for each in (*asked_of(9), asked_of(9)[0]):
            assert served.ask(each, tokens=80)[0].differs(truth[9][0]) > NOISE
        served.assert_at_rest()
        assert served.manager.usage()[0].chunks == 0


def test_a_role_means_what_it_says(engine, truth, tmp_path):
    stack = cpu_and_disk(tmp_path / "store")
    first, second = asked_of(9)
    for role, cached in (("kv_producer", [0, 0, 0]), ("kv_consumer", [512, 512, 384])):
        config = KVTransferConfig(
            kv_connector="KVTierConnector", kv_role=role, kv_connector_extra_config=stack,
            kv_load_failure_policy="recompute",
        )  # fmt: skip
        with engine(kv_transfer_config=config) as served:
            answers = [served.ask(each)[0] for each in (first, first)]
            before = served.manager.usage()[0].chunks
            if role == "kv_consumer":
                answers.append(served.ask(second)[0])
                assert served.manager.usage()[0].chunks == before == 8
            assert [answer.cached for answer in answers] == cached[: len(answers)]
            assert all(a.differs(t) < NOISE for a, t in zip(answers, (*truth[9][:1] * 2, truth[9][1]), strict=False))
            served.assert_at_rest()


def test_kv_held_by_the_engine_at_a_reset_is_not_stored(engine):
    """The engine's own prefix cache may survive it, with KV of before."""
    asked = asked_of(9)[0]
    with engine(cpu(), enable_prefix_caching=True) as served:
        served.ask(asked)
        assert served.connector.reset_cache()
        assert served.ask(asked)[0].cached == 512
        assert served.manager.usage()[0].chunks == 0
        forget(served)
        served.ask(asked)
        assert served.manager.usage()[0].chunks == 8
        served.assert_at_rest()


# -- the workers' reports

GROUPS = (make_group((4096, 8192)), make_group((512,), name="group 1", block_tokens=8))
REPORT = WorkerReport("cpu", GROUPS, (("page layout", "NHD"), ("cpu isa", "amx")), failure_policy="recompute")


def test_reports_of_all_ranks_arrive_as_they_were_and_are_removed(runtime):
    others = attrs.evolve(REPORT, refusal="these pages lie elsewhere")
    reports.leave("engine", 0, REPORT)
    reports.leave("engine", 1, others)
    reports.leave("neighbour", 0, others)
    assert reports.collect("engine", 2) == reports.collect("engine", 2) == [REPORT, others]
    assert [file.stat().st_mode & 0o777 for file in (runtime, *runtime.iterdir())] == [0o700, *[0o600] * 3]
    reports.remove("engine", 2)
    assert len(list(runtime.iterdir())) == 1
    assert "did not report" in reports.collect("engine", 2).reason


@pytest.mark.parametrize(("log_requests", "logged"), [("all", 2), ("hits", 0)])
def test_a_missing_report_is_a_refusal(engine, said, monkeypatch, log_requests, logged):
    monkeypatch.setattr(reports, "leave", lambda *args: None)
    with engine(cpu(log_requests=log_requests)) as served:
        why = "the workers did not report: do they run on another machine, or with a different XDG_RUNTIME_DIR?"
        assert f"kvtier: this engine is not served: {why}" in said()
        assert [served.ask(asked_of(9)[0])[0].cached for _ in range(2)] == [0, 0]
        assert sum(line.endswith(f"0 from kvtier ({why})") for line in said()) == logged


def test_a_malformed_report_is_a_refusal(runtime):
    reports.leave("engine", 0, REPORT)
    (file,) = runtime.iterdir()
    whole = json.loads(file.read_text())
    group = whole["groups"][0]
    parts = ([], {"device": "cpu"}, {**whole, "more": 1}, {**whole, "groups": 1}, {**whole, "groups": [1]})
    kinds = ({**whole, "groups": [{**group, "kind": "half attention"}]}, {**whole, "groups": [{**group, "more": 1}]})
    for text in ("", "{", *map(json.dumps, [*parts, *kinds])):
        file.write_text(text)
        assert reports.collect("engine", 1).reason.startswith("cannot read the reports of the workers: ")
    target = file.with_name("elsewhere")
    file.rename(target)
    file.symlink_to(target)
    assert "cannot read" in reports.collect("engine", 1).reason


@pytest.mark.parametrize("harm", ["open to others", "a link", "somebody else's"])
def test_a_folder_that_others_could_write_to_is_not_believed(runtime, tmp_path, monkeypatch, harm):
    reports.leave("engine", 0, REPORT)
    if harm == "open to others":
        runtime.chmod(0o770)
    elif harm == "a link":
        runtime.rename(tmp_path / "elsewhere")
        runtime.symlink_to(tmp_path / "elsewhere")
    else:
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
        monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
        (tmp_path / f"kvtier-{os.geteuid()}").mkdir(mode=0o700)
    assert "cannot read" in reports.collect("engine", 1).reason
    with pytest.raises(OSError):
        reports.leave("engine", 0, REPORT)


@pytest.mark.parametrize("unset", [True, False])
def test_without_a_runtime_folder_of_this_user_they_are_in_one_of_their_own(runtime, tmp_path, monkeypatch, unset):
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    monkeypatch.delenv("XDG_RUNTIME_DIR") if unset else runtime.parent.chmod(0o777)
    reports.leave("engine", 0, REPORT)
    assert reports.collect("engine", 1) == [REPORT]
    folder = tmp_path / f"kvtier-{os.geteuid()}"
    assert (folder.stat().st_mode & 0o777, len(list(folder.iterdir()))) == (0o700, 1)


def test_reports_of_dead_engines_are_removed(runtime):
    reports.leave("dead", 0, REPORT)
    (left,) = runtime.iterdir()
    reports.leave("alive", 0, REPORT)
    assert left.exists()
    os.utime(left, (0, time.time() - 25 * 3600))
    reports.leave("alive", 0, REPORT)
    assert not left.exists()
    assert reports.collect("alive", 1) == [REPORT]


def test_new_weights_are_new_to_kvtier_beside_another_connector(engine, said):
    """Both when the engine calls its workers and when a worker notices by itself."""
    from test_changed_weights import an_optimizers_step, any_function

    asked = prompt(66, 530)
    with engine(**together(neighbour("sync", 1), kvtier(cpu()))) as served:
        for change in (any_function, an_optimizers_step):
            served.ask(asked)
            before = served.ask(asked)[0]
            said()
            change(served, None)
            after = served.ask(asked)[0]
            assert (before.cached, after.cached) == (512, 0)
            assert len([line for line in said() if "invalidated" in line]) == 1
            served.ask(asked)
            served.assert_at_rest()
