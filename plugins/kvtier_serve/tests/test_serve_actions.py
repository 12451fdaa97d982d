"""`kvtier serve status|top|…`: what an operator asks of a running server on the command line."""

from __future__ import annotations

import json
import signal
import socket
from concurrent.futures import ThreadPoolExecutor

import pytest
from patience import HANG
from served import serving
from servers.stopping import stop
from test_kills import server
from test_operators import PROMPT, stored
from test_reload import Files
from test_serve_command import kvtier

from kvtier_core.cli import main
from kvtier_core.errors import BackendError
from kvtier_serve.operators.asking import RunningServer
from kvtier_serve.operators.http import HTTP
from kvtier_serve.quotas import QuotaBook
from kvtier_serve.reload import Reload

SALT = b'{"cache_salt": "a salt"}'


@pytest.fixture
def served(tmp_path, monkeypatch):
    monkeypatch.setenv("TENANT", "a salt")
    files = Files(tmp_path)
    with serving(tmp_path, 64, files.disk, quotas=QuotaBook(file=files.quotas)) as served:
        served.files = files
        served.server.reload = Reload(served.server.spaces, served.server.quotas, served.server.programs, files.read)
        http = HTTP(served.server)
        http.open_socket(tmp_path / "kvtier.sock.http")
        (tmp_path / "prompt.json").write_text(json.dumps(PROMPT))
        yield served
        http.close()


@pytest.fixture
def ask(served, capsys):
    """Runs an action; returns what it prints, and its exit status."""

    def run(*arguments):
        status = main(["serve", *map(str, arguments), "--socket", str(served.path)])
        said = capsys.readouterr()
        assert "Traceback" not in said.err
        return said.out, said.err, status

    return run


def test_the_status_has_memory_tiers_and_tenants(served, ask):
    stored(served)
    stack, path = stored(served, [token + 1 for token in PROMPT], SALT)
    for _ in range(2):  # only who comes back is a tenant
        stack.on_request(path, salt=SALT)
    stack.drain(HANG)
    out, _, status = ask("status")
    tenants = served.server.spaces.tenants
    assert status == 0 and out.startswith("2 engines, up 0 h 0 min\ncpu: ")
    for part in ("model: 2 engines", "cpu ", "disk ", "works", tenants.name(SALT), tenants.name(b"")):
        assert part in out
    told, _, _ = ask("status", "--json")
    assert [tier["chunks"] for tier in json.loads(told)["namespaces"][0]["tiers"]] == [6, 6]


def test_status_of_an_engine_names_the_command_for_a_server(served, capsys):
    assert main(["status", "--socket", str(served.path)]) == 2
    way = f"run kvtier serve status --socket {served.path}"
    assert capsys.readouterr().err == f"{served.path} is the socket of a server; {way}\n"


def test_top_looks_again_and_again(served, ask):
    stored(served)
    out, _, status = ask("top", "--count", 2, "--every", 0.01)
    assert status == 0 and out.count("1 engine, up") == 2 and out.count("in GB/s") == 2
    looks, _, _ = ask("top", "--count", 2, "--every", 0.01, "--json")
    assert [json.loads(line)[0]["sessions"] for line in looks.splitlines()] == [1, 1]


def test_a_prompt_is_explained_with_the_salt_of_an_environment_variable(served, ask, tmp_path):
    stored(served, salt=SALT)
    prompt = "explain", "--prompt", tmp_path / "prompt.json"
    assert "the first 0 of them" in ask(*prompt)[0]
    out, _, status = ask(*prompt, "--cache-salt", "env:TENANT")
    assert status == 0 and "the first 3 of them can be loaded" in out and "cpu, disk" in out
    with pytest.raises(SystemExit):
        ask(*prompt, "--cache-salt", "a salt")


def test_documents_are_arranged(served, ask, tmp_path):
    stored(served, salt=SALT)
    file, half = tmp_path / "documents.json", len(PROMPT) // 2
    file.write_text(json.dumps({"documents": [PROMPT[half:], PROMPT[:half]]}))
    out, err, status = ask("arrange", "--documents", file, "--cache-salt", "env:TENANT")
    assert [line.split() for line in out.splitlines()[1:3]] == [["1", "0", str(len(PROMPT))], ["0", "1", "0"]]
    assert out.splitlines()[3] == "in the order of the file: 0 cached tokens" and (err, status) == ("", 0)
    file.write_text(json.dumps({"documents": [[1]] * 40, "after": [1] * 40}))
    stored(served, [1] * 80)
    assert "a better one may exist" in ask("arrange", "--documents", file)[1]
    for wrong, why in (("[1]", "not an object"), ('{"documents": 1}', "Expected `array`"), ("{", "cannot read")):
        file.write_text(wrong)
        assert why in ask("arrange", "--documents", file)[1]


def test_chunks_are_dropped_and_erased_if_that_is_confirmed(served, ask):
    stored(served, salt=SALT)
    for action in (["clear"], ["erase", "--cache-salt", "env:TENANT"]):
        assert "pass --yes" in ask(*action)[1]
    assert ask("clear", "--yes") == ("3 chunks dropped\n", "", 0)
    out, err, status = ask("erase", "--cache-salt", "env:TENANT", "--yes")
    assert "disk: 3 chunks erased" in out and bool(status) is ("erase again" in err)
    assert "specify what to erase" in ask("erase", "--yes")[1]
    assert ask("clear", "--namespace", "none", "--yes")[2] == 2


def test_quotas_are_listed_and_set(served, ask):
    served.stack("model")
    assert ask("quota")[0].split() == ["quota", "of", "soft", "hard", "each", "tenant", "any", "any"]
    name = served.server.spaces.tenants.name(SALT)
    assert name in ask("quota", "--cache-salt", "env:TENANT", "--hard", "1MiB")[0]
    out, err, status = ask("quota", "--model", "model", "--soft", "2MiB")
    assert ["tenant", name, "any", "1MiB"] in [line.split() for line in out.splitlines()]
    assert ["model", "model", "2MiB", "any"] in [line.split() for line in out.splitlines()]
    assert not err and status == 0, "they outlive the server"
    assert ask("quota", "--model", "modle")[2] == ask("quota", "--hard", "1MiB")[2] == 2
    served.files.quotas.with_name("quotas.json.new").mkdir()
    assert "lost when the server stops" in ask("quota", "--model", "model")[1]


def test_prompts_are_pinned_and_pins_are_listed(served, ask, tmp_path):
    stored(served)
    out, _, status = ask("pins", "--add", "a name ü", "--prompt", tmp_path / "prompt.json", "--for", "90s")
    assert (out, status) == ("a name ü: 3 chunks are kept, 0 may follow\n", 0)
    assert ask("pins")[0].splitlines()[1].split() == ["a", "name", "ü", "model", "3", "3", "0.0", "h"]
    assert "3 slots are kept no longer" in ask("pins", "--delete", "a name ü")[0]
    assert len(ask("pins")[0].splitlines()) == 1
    assert "--prompt FILE" in ask("pins", "--add", "x")[1]


def test_a_reload_says_what_has_changed_and_what_needs_a_restart(served, ask):
    assert ask("reload") == ("nothing has changed\n", "", 0)
    served.files.change(slots=128, capacity="1MiB")
    out, err, status = ask("reload")
    assert "changed: $.tiers[1].capacity" in out and "needs a restart: $.tiers[0].capacity" in err and status == 1
    served.files.write_quotas("{")
    assert ask("reload")[2] == 2


@pytest.mark.more
def test_a_server_that_is_stopped_or_gone_is_told_apart(tmp_path, capsys):
    path = tmp_path / "s"
    with server(tmp_path, path) as stopped:
        assert main(["serve", "status", "--socket", str(path)]) == 0
        stop(stopped.pid)
        assert main(["serve", "status", "--socket", str(path)]) == 2
        assert "stopped" in capsys.readouterr().err
        stopped.send_signal(signal.SIGCONT)
        assert main(["serve", "--socket", str(path), "status"]) == 0, "the option may stand before the action"
        stopped.kill()
        stopped.wait()
    for action in ("status", "top", "quota", "pins", "reload"):
        assert main(["serve", action, "--socket", str(path)]) == 2
        assert "no server answers" in capsys.readouterr().err


@pytest.mark.parametrize("socket", ["x" * 150, "s"])
def test_an_address_that_cannot_be_is_refused_with_its_reason(tmp_path, socket):
    file = tmp_path / "kvtier.yaml"
    file.write_text("version: 1\ntiers:\n  - {type: cpu, capacity: 1MiB, huge_pages: off}\n")
    refused = kvtier("serve", "--config", file, "--socket", tmp_path / socket, "--http", "localhost:99999")
    assert refused.returncode == 2
    assert ("too long" if len(socket) > 1 else "99999' is not an address") in refused.stderr


def test_without_a_file_and_an_action_the_way_out_is_told(capsys):
    assert main(["serve"]) == 2
    assert "--config FILE" in capsys.readouterr().err


@pytest.mark.parametrize("status", [200, 404])
def test_an_answer_that_is_no_servers_leaves_no_connection_open(tmp_path, status):
    """As long as its error is kept, so would the connection be."""
    path = tmp_path / "stranger.http"
    with socket.socket(socket.AF_UNIX) as listening, ThreadPoolExecutor(1) as thread:
        listening.bind(str(path))
        listening.listen()
        asked = thread.submit(RunningServer.at_socket(path).ask, "GET", "/status")
        with listening.accept()[0] as stranger:
            stranger.settimeout(HANG)
            stranger.sendall(f"HTTP/1.0 {status} Whatever\r\n\r\nnot JSON".encode())
            stranger.shutdown(socket.SHUT_WR)
            assert isinstance(asked.exception(), BackendError)
            while stranger.recv(1 << 16):
                pass
