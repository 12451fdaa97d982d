"""`kvtier status`, `top` and `explain` in other processes, of a real engine in this one."""

from __future__ import annotations

import json
import os
import random
import socket
import subprocess
import sys

import pytest
from outsiders import TEXTS, assert_tame
from patience import HANG
from real_engines import CHUNK, cpu_and_disk

from kvtier_core.cli import main
from kvtier_core.outside import LONGEST

PROMPT = [random.Random(5).randrange(1, 500) for _ in range(4 * CHUNK + 5)]
START = "import sys; from kvtier_core.cli import main; sys.exit(main())"


def begin(*arguments):
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, "-c", START, *arguments], env=dict(os.environ), **pipes)


def ended(command):
    out, err = command.communicate(timeout=HANG)
    assert command.returncode == 0, err
    return out


def test_a_running_engine_tells_of_itself(engine, runtime, tmp_path):
    (tmp_path / "prompt.json").write_text(json.dumps(PROMPT))
    with engine(cpu_and_disk(tmp_path / "disk")) as served:
        (path,) = runtime.glob("status-*.sock")
        hanging = socket.socket(socket.AF_UNIX)
        hanging.connect(str(path))
        hanging.sendall(b'{"stat')
        truth = served.ask(PROMPT)[0]
        assert served.ask(PROMPT)[0].tokens == truth.tokens
        served.settle()

        (told,) = json.loads(ended(begin("status", "--json")))
        cpu, disk = told["tiers"]
        assert (cpu["chunks"], disk["chunks"], cpu["savings"]["loaded"]) == (4, 4, 4 * CHUNK)
        assert told["identity"] == served.connector.side.namespace.digest.hex()
        assert "4" in ended(begin("top", "--count", "2", "--every", "0.1"))

        lines = ended(begin("explain", "1")).splitlines()  # the second request; vLLM appends to its id
        assert len(lines) == 1 and lines[0].endswith(": 261 tokens: 256 from kvtier (cpu 256), 5 computed")

        asking = begin("explain", "--prompt", str(tmp_path / "prompt.json"))
        while asking.poll() is None:  # the owner answers in a step
            served.ask([1, 2, 3])
        told = ended(asking).splitlines()
        assert told[0] == f"261 tokens are 4 chunks of {CHUNK}; the first 4 of them can be loaded"
        assert told[-1].split("  ")[1].strip() == "cpu, disk"
        assert served.ask(PROMPT)[0].tokens == truth.tokens
        served.assert_at_rest()
        hanging.close()
    assert not path.exists()


def test_the_ids_of_clients_are_kept_and_shown_cut(engine, runtime, tmp_path, capsys):
    from vllm import SamplingParams

    with engine(cpu_and_disk(tmp_path / "disk")) as served:
        llm = served.llm.llm_engine
        for text in TEXTS.values():
            llm.add_request(text, {"prompt_token_ids": PROMPT}, SamplingParams(max_tokens=1, detokenize=False))
            while llm.has_unfinished_requests():
                llm.step()
            (told,) = served.connector.side.status.recent(1)
            assert_tame(told["request"], longest=LONGEST)
            capsys.readouterr()
            for asked in (text[: 1 << 16], told["request"]):
                assert main(["explain", asked]) == 0
                line, end = capsys.readouterr().out.split("\n")
                assert line.startswith(told["request"]) and not end
                assert_tame(line)
        served.assert_at_rest()


@pytest.mark.more
def test_an_engine_that_started_cold_says_in_what_it_differs(engine, runtime, tmp_path):
    (tmp_path / "prompt.json").write_text(json.dumps(PROMPT))
    with engine(cpu_and_disk(tmp_path / "disk")) as first:
        first.ask(PROMPT)
        first.settle()
    with engine(cpu_and_disk(tmp_path / "disk"), dtype="bfloat16") as other:
        asking = begin("explain", "--prompt", str(tmp_path / "prompt.json"))
        while asking.poll() is None:
            other.ask([1, 2, 3])
        told = ended(asking)
        assert "from token 0 on: not stored" in told
        assert "this engine started cold because disk holds another namespace: " in told
        assert "bfloat16" in told
