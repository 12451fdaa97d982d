"""An engine in a process of its own, beside the one of the test, which does what the test asks for."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
from fork_server import ForkServer
from patience import HANG
from real_engines import Answer, Engine, Outcome


def live(path: str, model: str, kvtier: dict[str, Any], options: dict[str, Any]) -> None:
    """In the other process: answer prompts until the test hangs up."""
    engine = Engine(Path(model), kvtier, **options)
    with socket.create_server(path, family=socket.AF_UNIX) as listener, listener.accept()[0].makefile("rw") as test:
        for line in test:
            asked = json.loads(line)
            if asked["reset"]:
                engine.llm.reset_prefix_cache(reset_connector=True)
            answer = engine.ask(asked["prompt"], **asked["options"])[0]
            told = {"answer": attrs.astuple(answer), "outcome": attrs.asdict(engine.outcomes()[-1]), "pid": os.getpid()}
            test.write(json.dumps({**told, "parameters": engine.parameters}) + "\n")
            test.flush()
            engine.settle()  # as a server does, which steps on for what is stored
    engine.close()


class OtherEngine:
    """Asks the other process."""

    def __init__(self, stream: Any):
        self._stream = stream
        self.outcome: Outcome | None = None  #: of the last prompt
        self.parameters: dict[str, Any] | None = None  #: kv_transfer_params of the last answer
        self.pid = 0  #: after the first prompt

    def ask(self, prompt: Sequence[int], *, reset: bool = False, **options: Any) -> Answer:
        """The answer to a prompt; before it vLLM is told to reset its caches, ours too, if ``reset``."""
        self._stream.write(json.dumps({"prompt": list(prompt), "reset": reset, "options": options}) + "\n")
        self._stream.flush()
        told = json.loads(self._stream.readline())
        self.outcome, self.pid = Outcome(**told["outcome"]), told["pid"]
        self.parameters = told["parameters"]
        tokens, logprobs, cached = told["answer"]
        return Answer(tuple(tokens), tuple(logprobs), cached)


@contextlib.contextmanager
def beside(
    fork_server: ForkServer, model: Path, kvtier: dict[str, Any], *, runtime: Path | None = None, **options: Any
) -> Iterator[OtherEngine]:
    """Another engine of this model, until the end of the block, in a runtime folder of its own or in this one."""
    with tempfile.TemporaryDirectory(prefix="kvtier-") as folder, contextlib.ExitStack() as closing:
        path, log = Path(folder, "socket"), Path(folder, "log")
        arguments = {"path": str(path), "model": str(model), "kvtier": kvtier, "options": options}
        environment = {
            "XDG_RUNTIME_DIR": str(runtime or folder),
            "VLLM_WORKER_MULTIPROC_METHOD": "fork",
        }
        fork_server.start("other_engine:live", log, environment, **arguments)
        deadline = time.monotonic() + HANG
        sock = closing.enter_context(socket.socket(socket.AF_UNIX))
        sock.settimeout(HANG)
        while sock.connect_ex(str(path)):
            assert time.monotonic() < deadline, log.read_text()[-6000:]
            time.sleep(0.05)
        try:
            yield OtherEngine(closing.enter_context(sock.makefile("rw")))
        except BaseException:
            print(log.read_text()[-6000:])
            raise
