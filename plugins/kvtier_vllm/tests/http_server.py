"""`vllm serve` in a process of its own, on a free port of the loopback."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import httpx
from fork_server import PASSIVE
from patience import HANG
from real_engines import MANY, Answer, Outcome
from servers.ports import free_port

from kvtier_doctor import engines


@attrs.frozen
class Completion(Answer):
    """The answer to one prompt over HTTP."""

    response: Mapping[str, Any]  #: as it came, from JSON

    @classmethod
    def of(cls, response: Mapping[str, Any]) -> Completion:
        choice, details = response["choices"][0], response["usage"]["prompt_tokens_details"] or {}
        logprobs = choice["logprobs"]["token_logprobs"]
        return cls(tuple(choice["token_ids"]), tuple(logprobs), details.get("cached_tokens") or 0, response)


@attrs.define
class Server:
    """A running server."""

    client: httpx.Client
    status: Path  #: the socket of its engine
    process: subprocess.Popen
    _known: int = 0  #: requests whose outcome was told before

    def complete(self, prompt: Sequence[int], **options: Any) -> Completion:
        """A greedy completion of four tokens."""
        asked = {"prompt": list(prompt), "max_tokens": 4, "temperature": 0, "logprobs": 1, "return_token_ids": True}
        return Completion.of(self.post("/v1/completions", json={**asked, **options}))

    def post(self, path: str, **options: Any) -> dict[str, Any]:
        """What it answers to a request that it grants."""
        response = self.client.post(path, **options)
        assert response.is_success, response.text
        return response.json()

    def get(self, path: str) -> httpx.Response:
        return self.client.get(path)

    def metric(self, name: str) -> float:
        """The sum of a metric over all of its labels."""
        lines = [line.split() for line in self.get("/metrics").text.splitlines()]
        return sum(float(words[1]) for words in lines if words[0].partition("{")[0] == name)

    def kill(self) -> None:
        """End all of its processes at once."""
        os.killpg(self.process.pid, signal.SIGKILL)

    def outcomes(self) -> list[Outcome]:
        """What became of each request since this was called last."""
        fresh = self.outcomes_so_far()
        self._known += len(fresh)
        return fresh

    def outcomes_so_far(self) -> list[Outcome]:
        """The same, and `outcomes` will have them again."""
        told = engines.ask(self.status, {"requests": MANY})["found"]
        return [Outcome.of(each) for each in told[self._known :]]


@contextlib.contextmanager
def serving(folder: Path, model: Path, stack: Mapping[str, Any], *options: str) -> Iterator[Server]:
    """A server of the model with kvtier, ended as an operator ends it."""
    _call_it_vllm(folder)
    port = free_port()
    transfer = {
        "kv_connector": "KVTierConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": stack,
    }
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(model)]
    command += ["--host", "127.0.0.1", "--port", str(port), "--kv-transfer-config", json.dumps(transfer), *options]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([PASSIVE, str(folder), *filter(None, sys.path)]),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "VLLM_SERVER_DEV_MODE": "1",
        "XDG_RUNTIME_DIR": str(folder),
        "TORCHDYNAMO_DISABLE": "1",
    }
    log = folder / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, env=environment, stdout=output, stderr=output, cwd=folder, start_new_session=True
        )
    try:
        with client_of(port) as client:
            _wait(process, client, log)
            (status,) = folder.glob("kvtier/status-*.sock")
            yield Server(client, status, process)
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(HANG)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def client_of(port: int, *, timeout: float = HANG) -> httpx.Client:
    """Each request has a connection of its own: servers close idle ones, perhaps just when one is used again."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    return httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=timeout, limits=limits, trust_env=False)


def _wait(process: subprocess.Popen, client: httpx.Client, log: Path) -> None:
    deadline = time.monotonic() + HANG
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(httpx.TransportError):
            if client.get("/health").status_code == httpx.codes.OK:
                return
        time.sleep(0.2)
    raise AssertionError(f"it does not serve\n{log.read_text()[-6000:]}")


def _call_it_vllm(folder: Path) -> None:
    """The wheel for CPUs has another name than `vllm`, under which the program asks for its own version."""
    import vllm

    about = folder / f"vllm-{vllm.__version__}.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {vllm.__version__}+cpu\n")
