"""Starts engines in processes of their own, forked from one process that has imported vLLM and started nothing.

Importing vLLM takes eight seconds of a core, and an engine as people run it has three or four processes. The server
imports it once for all of them.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

from patience import HANG

#: What each engine would import otherwise.
_HEAVY = (
    "vllm.v1.engine.core",
    "vllm.v1.engine.async_llm",
    "vllm.v1.worker.cpu_model_runner",
    "vllm.v1.worker.cpu_worker",
    "vllm.model_executor.models.llama",
    "kvtier_vllm.connector",
    "real_engines",
)

#: Before what the function returned, at the end of its log.
_RETURNED = "RETURNED "


# -- in the server ---------------------------------------------------------------------------------------


def serve() -> None:
    """Fork a process for each line of stdin. This process has no thread and no tensor that a fork could break."""
    for module in _HEAVY:
        importlib.import_module(module)
    real_engines = importlib.import_module("real_engines")
    real_engines.look_at_models_here()
    real_engines.keep_what_engines_share()
    importlib.import_module("kvtier_remote.client").Waits = real_engines.PATIENT
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps them
    for line in sys.stdin:
        if not os.fork():
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            try:
                _live(**json.loads(line))
            except BaseException:  # noqa: BLE001 - a child must not go on as a second server
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                os._exit(0)


def _live(function: str, log: str, environment: dict[str, str], arguments: dict[str, Any]) -> None:
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.update(environment)
    if os.environ.get("VLLM_WORKER_MULTIPROC_METHOD") == "fork":
        _fork_the_rest()
    module, _, name = function.partition(":")
    returned = getattr(importlib.import_module(module), name)(**arguments)
    print(f"\n{_RETURNED}{json.dumps(returned)}", flush=True)


def _fork_the_rest() -> None:
    """Have vLLM fork the processes of its engine, too: its CPU platform sets "spawn" whatever the environment says."""
    from vllm.platforms import current_platform

    platform = type(current_platform)
    check = platform.check_and_update_config

    def check_and_fork(config: Any) -> None:
        check(config)
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"

    platform.check_and_update_config = staticmethod(check_and_fork)


# -- in the test -----------------------------------------------------------------------------------------


#: Makes processes sleep where they would poll; a folder for ``PYTHONPATH``.
PASSIVE = str(Path(__file__).parent / "passive")


def _beside_the_environment() -> list[str]:
    """What this process imports from besides its environment, which the server has by itself."""
    return [path for path in sys.path if path and not Path(path).is_relative_to(sys.prefix)]


class ForkServer:
    """Forks processes that begin with vLLM imported. They and their children stay in its session."""

    def __init__(self) -> None:
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([PASSIVE, str(Path(__file__).parent), *_beside_the_environment()]),
            "TORCHDYNAMO_DISABLE": "1",  # else each engine spends two seconds on compiling a helper of the sampler
        }
        self._process = subprocess.Popen(
            [sys.executable, "-c", "import fork_server; fork_server.serve()"],
            env=environment,
            stdin=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def start(self, function: str, log: Path, environment: dict[str, str], **arguments: Any) -> None:
        """Call a function (``module:name``) in a new process with these variables; its output goes to ``log``.

        vLLM spawns the processes of its engine, unless the environment has ``VLLM_WORKER_MULTIPROC_METHOD=fork``.
        """
        order = {"function": function, "log": str(log), "environment": environment, "arguments": arguments}
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()

    def run(self, function: str, environment: dict[str, str], **arguments: Any) -> tuple[Any, str]:
        """Call a function as `start` does, and wait until its process and all children have ended.

        Returns what the function returned (as JSON has it) and what all of them logged.
        """
        with tempfile.TemporaryDirectory() as folder:
            log = Path(folder, "log")
            self.start(function, log, {"XDG_RUNTIME_DIR": folder, **environment}, **arguments)
            deadline = time.monotonic() + HANG
            while not log.exists() or self.members():
                if self._process.poll() is not None or time.monotonic() > deadline:
                    self.kill()
                    raise AssertionError(f"it hangs\n{log.read_text()[-6000:] if log.exists() else ''}")
                time.sleep(0.02)
            text = log.read_text()
        returned = [line for line in text.splitlines() if line.startswith(_RETURNED)]
        assert returned, text[-6000:]
        return json.loads(returned[-1].removeprefix(_RETURNED)), text

    def members(self) -> list[int]:
        """The living processes of the session, without the server."""
        return [pid for pid in pids() if pid != self._process.pid and _session_of(pid) == self._process.pid]

    def kill(self) -> None:
        """Kill all members, and those they start meanwhile."""
        while members := self.members():
            for pid in members:
                with contextlib.suppress(ProcessLookupError), open(os.pidfd_open(pid), "rb", buffering=0) as pidfd:
                    signal.pidfd_send_signal(pidfd.fileno(), signal.SIGKILL)
                    select.select([pidfd], [], [])

    def close(self) -> None:
        self._process.kill()  # first, so that it starts no other
        self._process.wait()
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self.kill()


def pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _session_of(pid: int) -> int | None:
    """None of a process that is dead, reaped or not."""
    try:
        state, _, _, session, *_ = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if state in "ZX" else int(session)
