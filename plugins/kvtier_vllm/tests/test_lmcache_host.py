"""kvtier below LMCache's server, for real engines. `make test-hosts` runs it with the LMCache that it installs."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path

import pytest
from chunk_files import sizes
from patience import wait_until
from real_engines import prompt
from servers.lmcache import LMCacheServer, hide_what_vllm_cannot_search
from test_server import NOISE

pytest.importorskip("lmcache", reason="LMCache is not installed: make test-hosts")

ASKED = prompt(190, 530)
CHUNK, CHUNKS = 64, 8
EXAMPLE = json.loads((Path(__file__).parents[3] / "examples/hosts/lmcache.json").read_text())


@pytest.fixture
def served(engine, model, tmp_path):
    """An engine with LMCache's connector and a server over the same disk."""
    from vllm.config import KVTransferConfig

    hide_what_vllm_cannot_search()
    disk = {"type": "disk", "path": str(tmp_path / "disk"), "capacity": "1GiB", "min_free": "0B"}
    config = {"version": 1, "load_wait": "20s", "tiers": [{"type": "cpu", "capacity": "16MiB"}, disk]}
    spec = {**EXAMPLE, "adapter_params": {"config": config, "models": {str(model): str(model)}}}

    @contextlib.contextmanager
    def start():
        server = LMCacheServer(tmp_path, spec, chunk_tokens=CHUNK, memory=0.25)
        connector = KVTransferConfig(**server.connector)
        with contextlib.closing(server), engine(None, kv_transfer_config=connector) as opened:
            yield opened

    return start


def test_an_engine_finds_after_a_restart_of_the_server_what_is_whole(engine, served, tmp_path):
    """By its first request."""
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


def frames(folder: Path) -> list[Path]:
    return [file for file, nbytes in sizes(folder / "disk").items() if nbytes > 64 << 10]
