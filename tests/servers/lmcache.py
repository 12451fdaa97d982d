"""LMCache's server, from the packages that `make test-hosts` installs, for real engines with LMCache's connector."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from patience import HANG, wait_until

from servers.ports import free_port

#: vLLM looks for its kernels in all modules, and stumbles over an object of this one, which LMCache imports by numba.
UNSEARCHABLE = "llvmlite.binding.ffi"
_MAIN = "import sys; from lmcache.cli.main import main; sys.exit(main())"


def hide_what_vllm_cannot_search() -> None:
    """Before an engine starts."""
    importlib.import_module(UNSEARCHABLE)
    sys.modules.pop(UNSEARCHABLE, None)


class LMCacheServer:
    """It has ``memory`` GiB above one L2 adapter, ``spec``, and logs into the folder."""

    def __init__(self, folder: Path, spec: Mapping[str, Any], *, chunk_tokens: int, memory: float):
        self._port, self._http = free_port(), free_port()
        self._log = folder / "server.log"
        command = [sys.executable, "-c", _MAIN, "server", "--port", str(self._port), "--http-port", str(self._http)]
        command += ["--l1-size-gb", str(memory), "--eviction-policy", "LRU", "--chunk-size", str(chunk_tokens)]
        command += ["--supported-transfer-mode", "engine_driven", "--l2-adapter", json.dumps(spec)]
        path = os.pathsep.join(filter(None, sys.path))
        environment = {**os.environ, "LMCACHE_TRACK_USAGE": "false", "PYTHONPATH": path}
        with self._log.open("w") as log:
            self._process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        wait_until(self._answers, "the server has not started")

    @property
    def connector(self) -> dict[str, Any]:
        """What an engine's KVTransferConfig is made of."""
        where = {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": self._port}
        extra = {**where, "lmcache.mp.mp_transfer_mode": "engine_driven"}
        return {"kv_connector": "LMCacheMPConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(HANG)

    def _answers(self) -> bool:
        assert self._process.poll() is None, self._log.read_text()
        with (
            contextlib.suppress(OSError),
            urllib.request.urlopen(f"http://127.0.0.1:{self._http}/healthcheck") as answer,
        ):
            return answer.status == 200
        return False
