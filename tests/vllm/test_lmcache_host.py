"""kvtier below LMCache's server, for real engines. `make test-hosts` runs it with the LMCache that it installs."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import prompt
from servers.redis import free_port
from test_server import NOISE

pytest.importorskip("lmcache", reason="make test-hosts")

ASKED = prompt(190, 530)
CHUNK, CHUNKS = 64, 8
PATIENCE = 120  # seconds: the server imports torch and more
MAIN = "import sys; from lmcache.cli.main import main; sys.exit(main())"


@pytest.fixture(autouse=True)
def module_that_vllm_cannot_search(monkeypatch):
    """vLLM looks for its kernels in all modules, and stumbles over an object of numba's, which LMCache imports."""
    importlib.import_module("llvmlite.binding.ffi")
    monkeypatch.delitem(sys.modules, "llvmlite.binding.ffi")


class Server:
    """LMCache's server, with the adapter of examples/hosts/lmcache.json over a disk."""

    def __init__(self, folder: Path, model: Path, port: int):
        self.port = port
        self._log = folder / "server.log"
        disk = {"type": "disk", "path": str(folder / "disk"), "capacity": "1GiB", "min_free": "0B"}
        config = {"version": 1, "load_wait": "20s", "tiers": [{"type": "cpu", "capacity": "16MiB"}, disk]}
        adapter = json.loads((Path(__file__).parents[2] / "examples/hosts/lmcache.json").read_text())
        adapter["adapter_params"] = {"config": config, "models": {str(model): str(model)}}
        command = [sys.executable, "-c", MAIN, "server", "--port", str(port), "--http-port", str(free_port())]
        command += ["--l1-size-gb", "0.25", "--eviction-policy", "LRU", "--chunk-size", str(CHUNK)]
        command += ["--supported-transfer-mode", "engine_driven", "--l2-adapter", json.dumps(adapter)]
        environment = {**os.environ, "LMCACHE_TRACK_USAGE": "false"}
        with self._log.open("w") as log:
            self._process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        wait_until(self._answers, "the server has not started")

    def says(self, words: str) -> bool:
        return words in self._log.read_text()

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(60)

    def _answers(self) -> bool:
        assert self._process.poll() is None, self._log.read_text()
        with contextlib.suppress(ConnectionError), socket.create_connection(("127.0.0.1", self.port)):
            return self.says("cache server is running...")
        return False


@pytest.fixture
def served(engine, model, tmp_path):
    """An engine with LMCache's connector and a server over the same disk."""
    from vllm.config import KVTransferConfig

    @contextlib.contextmanager
    def start():
        with contextlib.closing(Server(tmp_path, model, free_port())) as server:
            where = {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": server.port}
            extra = {**where, "lmcache.mp.mp_transfer_mode": "engine_driven"}
            transfer = KVTransferConfig(
                kv_connector="LMCacheMPConnector", kv_role="kv_both", kv_connector_extra_config=extra
            )
            with engine(None, kv_transfer_config=transfer) as opened:
                yield opened

    return start


def test_an_engine_finds_after_a_restart_of_the_server_what_is_whole(engine, served, tmp_path):
    with engine(None) as plain:
        truth = plain.ask(ASKED)[0]
    with served() as first:
        assert first.ask(ASKED)[0].cached == 0
        wait_until(lambda: len(frames(tmp_path)) >= CHUNKS, "not everything was stored")
    with served() as second:
        answer = second.ask(ASKED)[0]
        assert (answer.cached, answer.differs(truth) < NOISE) == (CHUNK * CHUNKS, True)
    for frame in frames(tmp_path):
        with frame.open("r+b") as file:
            file.seek(frame.stat().st_size // 2)
            byte = file.read(1)
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte[0] ^ 1]))
    with served() as third:
        answer = third.ask(ASKED)[0]
        assert (answer.cached, answer.differs(truth) < NOISE) == (0, True)


def wait_until(condition: Callable[[], bool], otherwise: str) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, otherwise
        time.sleep(0.05)


def frames(folder: Path) -> list[Path]:
    return [file for file in (folder / "disk").rglob("*") if file.is_file() and file.stat().st_size > 64 << 10]
