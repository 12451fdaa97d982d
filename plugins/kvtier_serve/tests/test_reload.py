"""A server that runs takes other quotas, capacities and limits; quotas that operators set outlive it."""

from __future__ import annotations

import contextlib
import json
import signal

import pytest
from books import used
from chunk_files import sizes
from patience import HANG, wait_until
from served import FRAME, config_of, serving
from servers.kvtier import KVTIER
from test_kills import process
from test_operators import SECRET, Client
from test_serve_command import kvtier
from test_shared_stack import steps_until, store
from test_tenants import OURS, ask, path_of

from kvtier_core.config import later
from kvtier_core.errors import ConfigError
from kvtier_core.stack.store_tier import tier
from kvtier_core.storekit.folder_lock import FolderLock
from kvtier_core.types import Nbytes
from kvtier_serve.operators.access import TOKEN
from kvtier_serve.operators.http import HTTP
from kvtier_serve.quotas import QuotaBook, Quotas
from kvtier_serve.reload import Reload
from kvtier_serve.tenants import Quota
from kvtier_testing.samples import make_keys


class Files:
    """The files of a server, which a test changes."""

    def __init__(self, folder):
        self.quotas = folder / "quotas.json"
        self.disk = {"type": "disk", "path": str(folder / "disk"), "capacity": f"{40 * FRAME}B", "min_free": "0B"}
        self._slots = 64

    def change(self, slots=64, **settings):
        self._slots = slots
        self.disk |= settings

    def write_quotas(self, text):
        self.quotas.touch(0o600)
        self.quotas.write_text(text)

    def read(self):
        return config_of(self._slots, self.disk)


@pytest.fixture
def reloaded(tmp_path, monkeypatch):
    monkeypatch.setenv(TOKEN, SECRET)
    files = Files(tmp_path)
    with operated(tmp_path, files) as (served, client):
        yield served, client, files


@contextlib.contextmanager
def operated(folder, files):
    """A server with these files, and a client of its operators."""
    with serving(folder, 64, files.disk, quotas=QuotaBook(file=files.quotas)) as served:
        served.server.reload = Reload(served.server.spaces, served.server.quotas, served.server.programs, files.read)
        http = HTTP(served.server)
        try:
            yield served, Client(f"http://127.0.0.1:{http.open_port('127.0.0.1', 0)}")
        finally:
            http.close()


def held(client, number=1):
    return client("status")["namespaces"][0]["tiers"][number]


def lying(folder):
    """The bytes of the frames in a folder, from which some may be leaving."""
    return [*sizes(folder).values()].count(FRAME) * FRAME


@pytest.mark.parametrize("at_once", [4, 64])
def test_a_disk_keeps_within_another_capacity_and_frames_leave_for_a_smaller_one(
    reloaded, tmp_path, monkeypatch, at_once
):
    monkeypatch.setattr(tier, "_LEAVE_AT_ONCE", at_once)
    served, client, files = reloaded
    stack = served.stack()
    store(stack, make_keys(30))
    stack.drain(HANG)
    assert held(client)["chunks"] == 30 and lying(tmp_path / "disk") == 30 * FRAME
    files.change(capacity=f"{10 * FRAME}B")
    (changed,) = client("reload")["changed"]
    assert changed == f"$.tiers[1].capacity: {Nbytes(40 * FRAME)} -> {Nbytes(10 * FRAME)}"
    wait_until(lambda: held(client)["capacity"] == 10 * FRAME and held(client)["chunks"] == 10)
    wait_until(lambda: lying(tmp_path / "disk") <= 10 * FRAME)
    files.change(capacity=f"{50 * FRAME}B")
    client("reload")
    store(stack, make_keys(60)[30:])
    stack.drain(HANG)
    assert held(client)["chunks"] == 40 and held(client)["capacity"] == 50 * FRAME


def test_a_namespace_that_is_opened_later_has_the_capacity_of_the_file(reloaded):
    served, client, files = reloaded
    files.change(capacity=f"{10 * FRAME}B", inflight="1MiB")
    assert len(client("reload")["changed"]) == 2
    served.stack()
    assert held(client)["capacity"] == 10 * FRAME
    assert client("reload") == {"changed": [], "needs_restart": []}


def test_a_tier_that_opens_later_has_the_capacity_of_the_file(tmp_path, monkeypatch):
    monkeypatch.setenv(TOKEN, SECRET)
    monkeypatch.setattr(later, "_EVERY", 0.05)
    files = Files(tmp_path)
    files.change(required=False)
    with contextlib.ExitStack() as former:
        lock = FolderLock(tmp_path / "disk")
        lock.take()
        former.callback(lock.release)
        with operated(tmp_path, files) as (served, client):
            stack = served.stack()
            assert len(client("status")["namespaces"][0]["tiers"]) == 1
            receipt = client("erase", {"namespace": client("status")["namespaces"][0]["namespace"]})
            assert "disk: not open; its chunks are found once it opens" in receipt["unreachable"]
            files.change(capacity=f"{10 * FRAME}B")
            assert len(client("reload")["changed"]) == 1
            former.close()
            steps_until(stack, lambda: len(client("status")["namespaces"][0]["tiers"]) == 2)
            wait_until(lambda: held(client)["capacity"] == 10 * FRAME)


def test_what_cannot_change_is_named_and_stays(reloaded, tmp_path):
    served, client, files = reloaded
    served.stack()
    before = client("status")["memory"]
    files.change(slots=128, path=str(tmp_path / "elsewhere"), timeout="9s")
    told = client("reload")
    assert told["changed"] == [] and [line.partition(":")[0] for line in told["needs_restart"]] == [
        "$.tiers[0].capacity",
        "$.tiers[1].timeout",
        "$.tiers[1].path",
    ]
    assert client("status")["memory"] == before and client("reload") == told


@pytest.mark.parametrize(
    "written", ["{", '{"tenant": {}}', '{"each_tenant": {"hard": "8 apples"}}', '{"models": {"m": {"hard": -1}}}']
)
def test_a_file_of_quotas_that_is_wrong_changes_nothing(reloaded, written):
    served, client, files = reloaded
    served.stack()
    client("set_quota", {"cache_salt": "ours", "hard": 1 << 30})
    before = client("quotas"), held(client)
    files.write_quotas(written)
    files.change(capacity=f"{10 * FRAME}B")
    assert str(files.quotas) in client("reload", status=409)["error"]
    assert (client("quotas"), held(client)) == before


def test_a_capacity_without_room_for_a_chunk_changes_nothing(reloaded):
    served, client, files = reloaded
    served.stack()
    before = client("quotas"), held(client)
    files.write_quotas('{"each_tenant": {"hard": "1GiB"}}')
    files.change(capacity="4KiB")
    assert "is smaller than one chunk" in client("reload", status=409)["error"]
    assert (client("quotas"), held(client)) == before


def test_quotas_of_the_file_are_in_force_after_a_reload(reloaded):
    served, client, files = reloaded
    stack = served.stack()
    for _ in range(2):  # only who comes back is a tenant
        ask(stack, path_of(served, OURS, 1, 40), OURS)
    files.write_quotas(f'{{"each_tenant": {{"hard": "{8 * FRAME}B"}}, "models": {{"model": {{"soft": "1MiB"}}}}}}')
    assert client("reload")["changed"] == ["the quota of each tenant", "the quota of model model"]
    tenants = served.server.spaces.tenants
    steps_until(stack, lambda: used(tenants)[tenants.name(OURS)] <= 8 * FRAME)
    assert client("quotas")["models"] == {"model": {"soft": 1 << 20, "hard": None}}
    files.write_quotas("{}")
    client("reload")
    assert client("quotas")["models"] == {} and tenants.quota(tenants.name(OURS)) == Quota()


def test_quotas_outlive_the_server_without_any_salt(tmp_path, monkeypatch):
    monkeypatch.setenv(TOKEN, SECRET)
    files = Files(tmp_path)
    with operated(tmp_path, files) as (served, client):
        served.stack("model")
        client("set_quota", {"cache_salt": "ours", "hard": 8 * FRAME})
        told = client("set_model_quota", {"model": "model", "soft": 1 << 20})
        assert told["lost"] == "" and "ours" not in files.quotas.read_text()
        assert files.quotas.stat().st_mode & 0o777 == 0o600
    with operated(tmp_path, files) as (served, client):
        assert client("quotas") == told
        stack = served.stack("model")
        stack.reserve(path_of(served, OURS, 1, 40), "store", OURS)
        stack.commit("store")
        tenants = served.server.spaces.tenants
        steps_until(stack, lambda: used(tenants)[tenants.name(OURS)] == 8 * FRAME)


def test_a_quota_that_cannot_be_written_is_in_force_and_says_that_it_will_be_lost(reloaded):
    _, client, files = reloaded
    files.quotas.with_name("quotas.json.new").mkdir()
    told = client("set_quota", {"cache_salt": "ours", "hard": 1})
    assert str(files.quotas) in told["lost"] and client("quotas") == told


def test_tenants_of_another_server_are_refused(tmp_path):
    files = Files(tmp_path)
    book = QuotaBook(Quotas(tenants={"0123": Quota(hard=1)}, key=b"another"))
    with serving(tmp_path, 16) as served, pytest.raises(ConfigError, match="different key"):
        book.begin(served.server.spaces)
    assert not files.quotas.exists()


@pytest.mark.parametrize("option", ["--soft-quota=1GiB", "--hard-quota=1GiB", "--model-quota=m=1GiB"])
def test_quotas_are_written_in_one_place(tmp_path, option):
    config = tmp_path / "kvtier.yaml"
    config.write_text("version: 1\ntiers:\n  - {type: cpu, capacity: 1MiB}\n")
    refused = kvtier("serve", "--config", config, "--quotas", tmp_path / "q", option)
    assert refused.returncode == 2 and "write all quotas in" in refused.stderr


def test_a_signal_reloads_and_never_ends_the_server(tmp_path):
    config, quotas, log = tmp_path / "kvtier.yaml", tmp_path / "quotas.json", tmp_path / "log"
    quotas.touch(0o600)
    quotas.write_text("{}")
    config.write_text("version: 1\ntiers:\n  - {type: cpu, capacity: 1MiB, huge_pages: off}\n")
    command = KVTIER, "serve", "--config", config, "--quotas", quotas, "--socket", tmp_path / "s"
    with log.open("w") as errors, process(*command, ready="server: unix:", stderr=errors) as running:
        quotas.write_text('{"each_tenant": {"hard": "1GiB"}}')
        running.send_signal(signal.SIGHUP)
        wait_until(lambda: "operator SIGHUP: reload: changed ['the quota of each tenant']" in log.read_text())
        config.write_text("version: 1\ntiers: []\n")
        running.send_signal(signal.SIGHUP)
        wait_until(lambda: "nothing was reloaded" in log.read_text() and "at least one tier" in log.read_text())
        config.write_text("version: 1\ntiers:\n  - {type: cpu, capacity: 2MiB, huge_pages: off}\n")
        running.send_signal(signal.SIGHUP)
        wait_until(lambda: "needs_restart ['$.tiers[0].capacity: 1MiB -> 2MiB']" in log.read_text())
        running.send_signal(signal.SIGTERM)
        assert running.wait(HANG) == 0
    assert json.loads(quotas.read_text()) == {"each_tenant": {"hard": "1GiB"}}, "only operators' calls write it"
