"""Real vLLM engines for the tests, most of them in this very process."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fork_server import ForkServer
from real_engines import PATIENT, Engine

from kvtier_remote import client


@pytest.fixture(autouse=True)
def preloaded():
    """vLLM has programs that this process starts load its OpenMP: other tests start some, which may not find it."""
    before = os.environ.get("LD_PRELOAD")
    yield
    os.environ.pop("LD_PRELOAD", None)
    if before is not None:
        os.environ["LD_PRELOAD"] = before


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    """For engines in this process; those of the fork server have it, too."""
    monkeypatch.setattr(client, "Waits", PATIENT)


@pytest.fixture(scope="session")
def model(tmp_path_factory) -> Path:
    import tiny_llama

    path = tmp_path_factory.mktemp("model")
    tiny_llama.make(path, seed=0)
    return path


@pytest.fixture(scope="session")
def latent(tmp_path_factory) -> Path:
    """A model with latent attention."""
    import tiny_llama

    path = tmp_path_factory.mktemp("latent")
    tiny_llama.make_mla(path)
    return path


@pytest.fixture(scope="session")
def with_words(model, tmp_path_factory) -> dict[str, Any]:
    """Options of an engine of the tiny model with a tokenizer, in which the token 12 is the word w12."""
    import tiny_llama
    import words

    path = tmp_path_factory.mktemp("tokenizer")
    words.tokenizer(tiny_llama.VOCAB).save_pretrained(path)
    shutil.copy(model / "config.json", path)  # without it vLLM tries again for some seconds
    return {"skip_tokenizer_init": False, "tokenizer": str(path)}


@pytest.fixture(scope="session")
def fork_server() -> Iterator[ForkServer]:
    """For engines with processes of their own."""
    fork_server = ForkServer()
    yield fork_server
    fork_server.close()


@pytest.fixture
def engine(model):
    """``engine(kvtier, **options)`` is a context with an Engine; the model is another's if ``model=`` says so."""

    @contextlib.contextmanager
    def start(kvtier: dict[str, Any] | None = None, *, model: Path = model, **options: Any) -> Iterator[Engine]:
        from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown

        try:
            started = Engine(model, kvtier, **options)
        except BaseException:
            ensure_kv_transfer_shutdown()  # else the next engine in this process would get this one's connector
            raise
        try:
            yield started
        finally:
            started.close()

    return start


@pytest.fixture
def longest_step(monkeypatch) -> Callable[[], float]:
    """``longest_step()``: the most seconds from a question of an engine of this process to its next for that request.

    A wait ends when the engine asks, so it may last that much longer than ``load_wait``.
    """
    from kvtier_vllm.connector import KVTierConnector

    last: dict[str, float] = {}
    steps = [0.0]
    ask = KVTierConnector.get_num_new_matched_tokens

    def noted(connector: KVTierConnector, request: Any, computed: int) -> tuple[int | None, bool]:
        before, last[request.request_id] = last.get(request.request_id), time.monotonic()
        try:
            return ask(connector, request, computed)
        finally:
            if before is not None:
                steps.append(time.monotonic() - before)

    monkeypatch.setattr(KVTierConnector, "get_num_new_matched_tokens", noted)
    return lambda: max(steps)


@pytest.fixture
def runtime(monkeypatch) -> Iterator[Path]:
    """The folder of what the engines and workers of this test alone tell each other.

    Its path is short: that of a Unix socket has at most 107 bytes.
    """
    with tempfile.TemporaryDirectory(prefix="kvtier-") as folder:
        monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
        yield Path(folder, "kvtier")


@pytest.fixture
def said() -> Iterator[Any]:
    """``said()`` are the log lines of kvtier since it was called last."""
    records: list[logging.LogRecord] = []

    def keep(record: logging.LogRecord) -> bool:
        if record.levelno >= logging.INFO:
            records.append(record)
        return True

    def lines() -> list[str]:
        found = [record.getMessage() for record in records]
        records.clear()
        return found

    log = logging.getLogger("kvtier")
    log.setLevel(logging.INFO)
    log.addFilter(keep)  # a handler would not survive: vLLM sets up logging again with its first engine
    yield lines
    log.removeFilter(keep)


@pytest.fixture
def ranges_read(monkeypatch) -> list[Any]:
    """The extents of slabs that workers of this process read. No other way from the slabs is open to it."""
    from kvtier_gds.backend import GdsBackend
    from kvtier_gds.slab_files import SlabFiles

    extents = []
    read = SlabFiles.read_extents

    def noted(files, wanted, into):
        extents.extend(wanted)
        return read(files, wanted, into)

    def closed(backend, keys, into):
        raise AssertionError("a frame was read into a slot")

    monkeypatch.setattr(SlabFiles, "read_extents", noted)
    monkeypatch.setattr(GdsBackend, "read", closed)
    return extents
