"""What the containers of a manifest do, in a process of a pod (tests/pods.py). Each function prints what came of it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path

from patience import HANG
from serving import Serving
from test_kills import process, serves

import kvtier_peers.plugin
from kvtier_testing.samples import make_keys

HTTP = "http://127.0.0.1:8100"


def owns(*command: str) -> None:
    """An init container: root, with the capabilities that the manifest leaves it."""
    subprocess.run(["setpriv", "--no-new-privs", "--bounding-set=-all,+chown", *command], check=True)


def server(command: Sequence[str], probes: dict[str, dict], engine_file: str) -> None:
    """A start of a server: its probes, its metrics, and an engine that finds its chunks, or stores them."""
    with process(*command, ready="ready; in an engine's file") as running:
        outcome = {
            **{name: _probe(probe) for name, probe in probes.items()},
            "doctor": _status("kvtier", "doctor", engine_file),
            "found": serves(Path(command[command.index("--socket") + 1])),
        }
        if "--http" in command:
            outcome["metrics"] = _answer("/metrics")
            outcome["metrics for readers"] = _answer("/metrics", os.environ["KVTIER_HTTP_READ_TOKEN"])
        running.send_signal(signal.SIGTERM)
        outcome["ended"] = running.wait(HANG)
    print(json.dumps(outcome))


def engine(file: str) -> None:
    """A start of an engine with tiers of its own, which finds its chunks, or stores them."""
    checked = _status("kvtier", "check", "--open", file)
    with Serving(Path(file), kvtier_peers.plugin) as serving:
        print(json.dumps({"check": checked, "found": serving.ask(make_keys(4))}))


def _probe(probe: dict) -> int:
    return _status(*probe["exec"]["command"]) if "exec" in probe else _answer(probe["httpGet"]["path"])


def _status(*command: str) -> int:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=HANG)
    if done.returncode:
        print(done.stdout)
    return done.returncode


def _answer(call: str, token: str = "") -> int:
    asked = urllib.request.Request(HTTP + call, headers={"Authorization": f"Bearer {token}"} if token else {})
    try:
        with urllib.request.urlopen(asked, timeout=HANG) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code
