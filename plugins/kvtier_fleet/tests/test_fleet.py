"""`kvtier fleet` over real servers: what it shows, what it changes, and what it says of servers that do not answer."""

from __future__ import annotations

import contextlib
import http.server
import json
import re
import shutil
import socket
import subprocess
import sys
import threading
from pathlib import Path
from urllib.parse import quote

import httpx
import pytest
from outsiders import TEXTS, assert_tame
from patience import HANG, wait_until
from served import FRAME, LAYOUT, PATIENT, Serving, config_of, keys_of
from servers.ports import free_port
from servers.redis import make_certificate
from shown_page import shown_by_page
from source_copy import ROOT

import kvtier_peers.plugin
from kvtier_core.cli import main
from kvtier_core.errors import ConfigError
from kvtier_core.types import EnvSecret, Seconds
from kvtier_fleet import draining
from kvtier_fleet.fleet import Fleet
from kvtier_fleet.http import FleetHTTP
from kvtier_fleet.settings import FleetSettings, load
from kvtier_serve.operators.access import READ_TOKEN, TOKEN
from kvtier_serve.operators.asking import RunningServer
from kvtier_serve.operators.console import OPERATIONS, Console
from kvtier_serve.operators.forms import Held
from kvtier_serve.operators.http import HTTP

PAGE = ROOT / "docs/fleet.md"
SECRET = "a token of this test"
BEARER = {"Authorization": f"Bearer {SECRET}"}
PROMPT = list(range(3 * LAYOUT.tokens))
SALT = b'{"cache_salt": "a salt"}'


class Node:
    """A server on a thread, with operators at a port of loopback."""

    def __init__(self, folder, port=0, certificate=None, key=None, stores=(), slots=64):
        folder.mkdir(exist_ok=True)
        self._config = config_of(slots, *stores, plugins=(kvtier_peers.plugin,))
        self.served = Serving(self._config, folder / "kvtier.sock")
        self._http = HTTP(self.served.server)
        self.port = self._http.open_port("127.0.0.1", port, certificate, key)
        self.name = f"127.0.0.1:{self.port}"

    def store(self, tokens=PROMPT, salt=b"", model="model"):
        """An engine of this node stores the chunks of a prompt."""
        stack = self.served.stack(model, waits=PATIENT)
        (space,) = (space for space in self.served.server.spaces if space.model == model)
        path = keys_of(space.namespace, tokens, salt)
        stack.reserve(path, "store", salt)
        stack.commit("store")
        stack.drain(HANG)

    def named(self, model="model"):
        """The keys of a model's chunks in memory, from `POST /held`."""
        (digest,) = (each.namespace.digest.hex() for each in self.served.server.spaces if each.model == model)
        held = httpx.post(f"http://{self.name}/held", json={"namespace": digest}, headers=BEARER, timeout=HANG).json()
        return {key for key, _ in held["chunks"]}

    @property
    def quotas(self):
        return self.served.server.quotas.now

    def close(self):
        if self._http:
            self._http.close()
            self.served.close()
        self._http = None


@pytest.fixture
def nodes(tmp_path, monkeypatch):
    """Makes so many nodes."""
    monkeypatch.setenv(TOKEN, SECRET)
    monkeypatch.setenv("TENANT", "a salt")
    with contextlib.ExitStack() as closing:

        def start(count, name="node", **options):
            made = [Node(tmp_path / f"{name} {number}", **options) for number in range(count)]
            for node in made:
                closing.callback(node.close)
            return made

        yield start


@pytest.fixture
def peers(nodes):
    """Makes this many nodes that are peers of each other, each with an engine of a model."""

    def start(count, **options):
        addresses = [f"127.0.0.1:{free_port()}" for _ in range(count)]
        made = []
        for address in addresses:
            tier = {"type": "peers", "listen": address, "peers": addresses}
            made += nodes(1, name=f"peer {len(made)}", stores=[tier], **options)
            made[-1].served.stack(waits=PATIENT)
        return made

    return start


@pytest.fixture
def fleet(tmp_path, capsys):
    """Runs an action on nodes; returns what it prints, and its exit status."""
    (tmp_path / "prompt.json").write_text(json.dumps(PROMPT))

    def run(nodes, *arguments, **declared):
        file = tmp_path / "fleet.yaml"
        servers = [getattr(node, "name", node) for node in nodes]
        file.write_text(json.dumps({"version": 1, "patience": f"{HANG}s", "servers": servers, **declared}))
        status = main(["fleet", "--config", str(file), *map(str, arguments)])
        said = capsys.readouterr()
        assert "Traceback" not in said.err
        return said.out, said.err, status

    return run


@contextlib.contextmanager
def held(node):
    """The owner of this server answers nothing in this context."""
    hangs, goes_on = threading.Event(), threading.Event()

    def hang():
        hangs.set()
        goes_on.wait(HANG)

    node.served.server.ask(hang)
    assert hangs.wait(HANG)
    try:
        yield
    finally:
        goes_on.set()


@contextlib.contextmanager
def answering(status, body):
    """The address of something that gives this answer to everything."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listening:
        thread = threading.Thread(target=listening.serve_forever, daemon=True)
        thread.start()
        yield f"127.0.0.1:{listening.server_port}"
        listening.shutdown()
        thread.join()


def test_the_status_has_a_line_for_each_server_and_their_sum(nodes, fleet):
    first, second = made = nodes(2)
    first.store()
    first.store(model="another")
    out, err, status = fleet(made, "status")
    assert not err and status == 0
    head, *rows = (line.split() for line in out.splitlines())
    assert head[0] == "server" and [row[:3] for row in rows] == [
        [first.name, "2", "2"],
        [second.name, "0", "0"],
        ["all", "2", "2"],
    ]
    told = json.loads(fleet(made, "status", "--json")[0])
    assert told["servers"][first.name]["namespaces"][0]["model"] == "model" and not told["silent"]
    only = fleet(made, "status", "--on", second.name)[0]
    assert second.name in only and first.name not in only
    assert "no server of this fleet" in fleet(made, "status", "--on", "node-7:8100")[1]


def test_top_looks_again_and_again(nodes, fleet):
    made = nodes(2)
    made[0].store()
    out, _, status = fleet(made, "top", "--count", 2, "--every", 0.01)
    assert status == 0 and out.count("stored GB/s") == 2
    cells = [line.split()[-2:] for line in out.splitlines() if line.startswith(made[0].name)]
    assert cells == [["-", "-"], ["0.00", "0.00"]]


def test_who_holds_a_prompt_is_found_with_its_salt(nodes, fleet, tmp_path):
    first, second = made = nodes(2)
    first.store(PROMPT[: LAYOUT.tokens], SALT)
    second.store(salt=SALT)
    ask = "find", "--prompt", tmp_path / "prompt.json"
    _, *rows = fleet(made, *ask, "--cache-salt", "env:TENANT")[0].splitlines()
    assert [row.split()[:4] for row in rows] == [
        [second.name, str(3 * LAYOUT.tokens), "3", "of"],
        [first.name, str(LAYOUT.tokens), "1", "of"],
    ]
    assert "3 cpu" in rows[0] and "1 cpu" in rows[1]
    assert fleet(made, *ask)[0].count("0 of 3") == 2, "with the salt alone"


def test_documents_are_arranged_for_each_server_and_the_longest_prefix_is_first(nodes, fleet, tmp_path):
    first, second = made = nodes(2)
    first.store(PROMPT[: LAYOUT.tokens])
    second.store()
    documents = [PROMPT[LAYOUT.tokens :], PROMPT[: LAYOUT.tokens]]
    (tmp_path / "documents.json").write_text(json.dumps({"documents": documents}))
    out, _, status = fleet(made, "arrange", "--documents", tmp_path / "documents.json")
    held = [str(3 * LAYOUT.tokens), str(LAYOUT.tokens)]
    assert [line.split() for line in out.splitlines()[1:]] == [
        [second.name, "1", "0", held[0], "0"],
        [first.name, "1", "0", held[1], "0"],
    ]
    assert status == 0


def test_prompts_are_prefetched_and_pinned_everywhere(nodes, fleet, tmp_path):
    made = nodes(2)
    for node in made:
        node.store()
    prompt = "--prompt", tmp_path / "prompt.json"
    assert all(line.split()[1:3] == ["3", "0"] for line in fleet(made, "prefetch", *prompt)[0].splitlines()[1:])
    out, _, status = fleet(made, "pins", "--add", "system", *prompt, "--for", "90s")
    assert status == 0 and out.count("3 chunks are kept, 0 may follow") == 2
    assert fleet(made, "pins")[0].count("system") == 2
    assert fleet(made, "pins", "--delete", "system", "--on", made[0].name)[0].count("3 slots are kept no longer") == 1
    assert fleet(made, "pins")[0].count("system") == 1


@pytest.fixture
def patient(monkeypatch):
    """Nothing is given up because peers meet late: on a busy machine that takes longer."""
    monkeypatch.setattr(draining, "_PAUSE", 0.1)
    monkeypatch.setattr(draining, "_IN_VAIN", 10 * HANG)


@pytest.mark.usefixtures("patient")
def test_what_only_one_server_has_in_memory_comes_into_that_of_its_peers(peers, fleet, monkeypatch):
    monkeypatch.setattr(draining, "_AT_ONCE", 2)
    first, second, third = peers(3)
    other = [token + 1 for token in PROMPT]
    prompts = [PROMPT, [*PROMPT[: LAYOUT.tokens], *other], *([token, *other] for token in range(2, 9))]
    for tokens in prompts:
        first.store(tokens)
    second.store(PROMPT[: 2 * LAYOUT.tokens])
    there = first.named()
    out, err, status = fleet([first, second, third], "drain", first.name)
    assert (out, err, status) == (f"model: {len(there) - 2} chunks came into the memory of others\n", "", 0)
    assert second.named() | third.named() >= there == first.named()
    assert third.named() and second.named() & third.named() == set(), "shared out, and nothing twice"
    out, err, status = fleet([first, second, third], "drain", first.name)
    assert (out, err, status) == ("model: 0 chunks came into the memory of others\n", "", 0)


@pytest.mark.usefixtures("patient")
def test_only_chosen_servers_take_what_another_has(peers, fleet):
    first, second, third = peers(3)
    first.store()
    assert fleet([first, second, third], "drain", first.name, "--on", third.name)[2] == 0
    assert third.named() == first.named() and not second.named()


def test_what_comes_to_no_other_server_is_said(nodes, peers, fleet, tmp_path):
    first, second = peers(2, slots=8)
    for begin in range(4):
        first.store([begin, *PROMPT])
    alone, answers_no = nodes(1)[0], f"127.0.0.1:{free_port()}"
    alone.store(model="another")
    out, err, status = fleet([first, second], "drain", first.name)
    assert status == 1 and re.fullmatch(r"model: \d chunks came into the memory of others\n", out)
    assert re.fullmatch(r".*model: \d chunks came to no other server: they have no room, or are not its peers\n", err)
    assert int(out.split()[1]) <= len(second.named()) <= 2, "prefetches take a quarter of the memory"
    out, err, status = fleet([alone, first], "drain", alone.name)
    assert status == 1 and "another: 3 chunks came to no other server: none of these has engines of this model" in err
    assert fleet([first, second, answers_no], "drain", second.name)[2] == 1
    for wrong in (["node-9"], [first.name, "--on", "node-9"]):
        assert "node-9: no server of this fleet" in fleet([first, second], "drain", *wrong)[1]


@pytest.mark.parametrize("chunks", [[("a", 0)], [("a", -1), ("b", 7)], [("a", -2)]])
def test_a_list_of_chunks_that_cannot_be_is_refused(peers, fleet, monkeypatch, chunks):
    def held(*_):
        yield
        return Held(chunks, 0)

    first, second = peers(2)
    operation = next(each for each in OPERATIONS if each.path == "/held")
    monkeypatch.setattr(
        Console,
        "carry_out",
        lambda console, each, *rest, real=Console.carry_out: (
            held() if each is operation else real(console, each, *rest)
        ),
    )
    _, err, status = fleet([first, second], "drain", first.name)
    assert status and "the answer cannot be read" in err


def test_chunks_are_dropped_and_erased_everywhere_if_that_is_confirmed(nodes, fleet):
    made = nodes(2)
    for node in made:
        node.store(salt=SALT)
    for action in (["clear"], ["erase", "--cache-salt", "env:TENANT"]):
        assert "pass --yes" in fleet(made, *action)[1]
    out, err, status = fleet(made, "erase", "--cache-salt", "env:TENANT", "--yes")
    assert out.count("cpu: 3 chunks erased") == 2 and bool(status) is ("erase again" in err)
    made[0].store()
    assert sorted(line.split()[1] for line in fleet(made, "clear", "--yes")[0].splitlines()) == ["0", "3"]
    assert "specify what to erase" in fleet(made, "erase", "--yes")[1]


def test_what_was_not_erased_somewhere_is_said(nodes, fleet):
    first, gone = nodes(2)
    first.store(salt=SALT)
    gone.close()
    out, err, status = fleet([first, gone], "erase", "--cache-salt", "env:TENANT", "--yes")
    assert "3 chunks erased" in out and f"{gone.name}: no server answers" in err and "not erased there" in err
    assert status == 1
    assert fleet([first, gone], "clear", "--yes")[2] == 1


def test_a_quota_is_shared_between_all_servers_also_those_that_do_not_answer(nodes, fleet):
    *made, gone = nodes(4)
    for node in made:
        node.served.stack("model")
    gone.close()
    _, err, status = fleet([*made, gone], "quota", "--model", "model", "--soft", "2MiB", "--hard", "4MiB")
    assert status == 1 and gone.name in err
    assert {(node.quotas.models["model"].soft, node.quotas.models["model"].hard) for node in made} == {
        (512 << 10, 1 << 20)
    }
    assert fleet(made, "quota", "--cache-salt", "env:TENANT", "--hard", "3MiB")[2] == 0
    assert [next(iter(node.quotas.tenants.values())).hard for node in made] == 3 * [1 << 20]
    assert fleet(made, "quota")[0].count("tenant ") >= 6
    assert "no engine of 'modle'" in fleet(made, "quota", "--model", "modle", "--hard", "1MiB")[1]
    assert fleet(made, "quota", "--hard", "1MiB")[2] == 2


def test_what_is_declared_is_applied_again_to_a_server_that_restarts(nodes, fleet, tmp_path, monkeypatch):
    made = nodes(2)
    declared = {
        "models": [{"model": "model", "hard": f"{64 * FRAME}B"}],
        "tenants": [{"cache_salt": "env:TENANT", "hard": "2MiB"}],
        "pins": [{"name": "system", "prompt": str(tmp_path / "prompt.json")}],
    }
    for node in made:
        node.store()
    out, err, status = fleet(made, "apply", **declared)
    assert not err and status == 0 and out.count("set on 2 of 2 servers") == 3
    monkeypatch.setenv("KVTIER_FLEET", str(tmp_path / "fleet.yaml"))
    assert main(["fleet", "apply"]) == 0
    assert [node.quotas.models["model"].hard for node in made] == 2 * [32 * FRAME]

    made[0].close()
    again = Node(tmp_path / "again", port=made[0].port)
    try:
        again.store()
        assert not again.quotas.models
        assert fleet(made, "apply", **declared)[2] == 0
        assert again.quotas.models["model"].hard == 32 * FRAME
        assert fleet(made, "pins")[0].count("system") == 2
    finally:
        again.close()


def test_declarations_are_read_again_each_time(nodes, fleet, tmp_path, monkeypatch):
    (node,) = made = nodes(1)
    node.served.stack("model")
    looks = iter(["4MiB", "no size", "8MiB", "no list"])
    seen = []

    def pause(seconds):
        seen.append(node.quotas.models["model"].hard)
        if (size := next(looks, None)) is None:
            raise KeyboardInterrupt
        told = {"version": 1, "servers": [node.name], "models": [{"model": "model", "hard": size}]}
        if size == "no list":
            told |= {"file": str(tmp_path / "none"), "models": []}
        (tmp_path / "fleet.yaml").write_text(json.dumps(told))

    monkeypatch.setattr("kvtier_fleet.actions.time.sleep", pause)
    _, err, status = fleet(made, "apply", "--every", "1s", models=[{"model": "model", "hard": "2MiB"}])
    assert seen == [2 << 20, 4 << 20, 4 << 20, 8 << 20, 8 << 20] and status == 0
    assert "'no size' is not a size" in err and "what was declared before stays" in err


@pytest.mark.more
def test_fifty_servers_of_which_some_are_killed_stopped_or_old(nodes, fleet, tmp_path):
    made = nodes(50)
    for node in made[:3]:
        node.store()
    killed, stopped, *alive = made
    killed.close()
    with answering(404, b"Not Found") as older, answering(200, b'{"boot": 1}') as newer, held(stopped):
        (tmp_path / "more").write_text(f"# others\n{older}\n{newer}  # these say other things\nnowhere.invalid:8100\n")

        def all_alive():
            """A busy machine may need more than the two seconds after which a server says that it cannot answer."""
            out, err, status = fleet(made, "status", file=str(tmp_path / "more"))
            assert status == 1
            return err if len(out.splitlines()) == 1 + len(alive) + 1 else ""

        err = wait_until(all_alive)
        for name, why in (
            (killed.name, "no server answers"),
            (stopped.name, "no progress"),
            (older, "does not know GET /status"),
            (newer, "cannot be read"),
            ("nowhere.invalid:8100", ""),
        ):
            assert any(line.startswith(f"{name}: ") and why in line for line in err.splitlines()), name
        prompt = "find", "--prompt", tmp_path / "prompt.json", "--json"
        told = wait_until(lambda: (said := json.loads(fleet(made, *prompt)[0]))["servers"] and said)
        assert len(told["servers"]) == 1, "the others never had an engine, and say so"
        assert told["silent"].keys() == {node.name for node in made} - {alive[0].name}
    wait_until(lambda: fleet(alive, "status")[2] == 0)


@pytest.mark.parametrize("text", [text[:9999] for text in TEXTS.values()], ids=TEXTS)
def test_what_a_server_says_forges_no_line(fleet, text):
    tier = {"tier": text, "nbytes": 1, "capacity": 1, "chunks": 1, "can_read": False, "can_write": True, "events": {}}
    space = {"namespace": text, "model": text, "engines": 1, "asked": 1, "found": 1, "tiers": [tier]}
    told = {"boot": text, "uptime": 1.0, "at": 1.0, "sessions": 1, "memory": [], "namespaces": [space]}
    for status, body in ((200, told), (409, {"error": text}), (200, {text: text})):
        with answering(status, json.dumps(body).encode()) as address:
            out, err, _ = fleet([address], "status")
            assert_tame(*out.split("\n"), *err.split("\n"), longest=10000)
            assert err


def test_a_server_of_another_protocol_forges_no_line(fleet):
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as listening:

        def answer():
            client, _ = listening.accept()
            with client:
                client.sendall(b"a line\33[2J\0 forged\r\n")
                client.recv(1 << 16)

        thread = threading.Thread(target=answer)
        thread.start()
        _, err, status = fleet([f"127.0.0.1:{listening.getsockname()[1]}"], "status")
        thread.join()
    assert status == 1 and r"a line\x1b[2J\x00 forged" in err
    assert_tame(*err.split("\n"))


def test_an_operators_words_forge_no_line_in_the_log(nodes, asking, caplog):
    caplog.set_level("INFO", "kvtier")
    url = asking(nodes(1))
    for text in (text[:9999] for text in TEXTS.values() if "\ud800" not in text):
        named = {"params": {"on": [text, "none"]}, "headers": BEARER, "timeout": HANG}
        assert httpx.post(f"{url}/clear", json={}, **named).status_code == 409
        assert httpx.delete(f"{url}/pins/{quote(text, safe='')}", **named).status_code == 409
    assert sum("operator" in line for line in caplog.messages) == 2 * (len(TEXTS) - 1)
    assert_tame(*caplog.messages)


def test_a_name_stands_for_all_its_addresses_and_a_server_is_counted_once(nodes, fleet, monkeypatch):
    """A node has an address of either kind, and a service those of all its nodes."""
    first, second = nodes(2)
    resolve = socket.getaddrinfo
    found = [resolve("127.0.0.1", node.port, type=socket.SOCK_STREAM)[0] for node in (first, second)]
    also = (socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("::1", first.port, 0, 0))
    named = {"node": [also, found[0]], "service": [*found, also], "old": [also]}
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, *_, **__: named.get(host) or resolve(host, *_, **__))
    assert [line.split()[0] for line in fleet(["node:8100"], "status")[0].splitlines()[1:-1]] == ["node:8100"]
    rows = fleet(["service:8100"], "status")[0].splitlines()[1:-1]
    assert sorted(row.split()[0] for row in rows) == sorted([first.name, second.name])
    one = fleet(["service:8100"], "status", "--on", second.name)[0].splitlines()[1:-1]
    assert [row.split()[0] for row in one] == [second.name]
    assert len(fleet(["service:8100"], "status", "--on", "service:8100")[0].splitlines()) == 4
    assert "old:8100: no server answers" in fleet(["old:8100"], "status")[1]


def test_a_server_that_is_silent_costs_its_patience_and_no_more(nodes, fleet, monkeypatch):
    (node,) = nodes(1)
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as silent:
        name = f"127.0.0.1:{silent.getsockname()[1]}"
        _, err, status = fleet([node, name], "status", patience="200ms")
    assert status == 1 and f"{name}: no answer within 0.2 s" in err


def test_over_tls_a_server_proves_who_it_is(nodes, fleet, tmp_path):
    for name in ("own", "other"):
        (tmp_path / name).mkdir()
        make_certificate(tmp_path / name)
    (node,) = nodes(1, certificate=str(tmp_path / "own/ca.pem"), key=str(tmp_path / "own/key.pem"))
    assert fleet([node], "status", ca=str(tmp_path / "own/ca.pem"))[2] == 0
    for ca, why in (({}, "no server answers"), ({"ca": str(tmp_path / "other/ca.pem")}, "certificate verify failed")):
        _, err, status = fleet([node], "status", **ca)
        assert status == 1 and why in err
    assert "cannot use the authority" in fleet([node], "status", ca=str(tmp_path / "none.pem"))[1]


def test_who_has_no_token_or_only_one_for_reading_is_refused(nodes, fleet, monkeypatch):
    monkeypatch.setenv(READ_TOKEN, "read only")
    (node,) = nodes(1)
    monkeypatch.setenv("READER", "read only")
    monkeypatch.setenv("WRONG", "wrong")
    assert fleet([node], "status", token="env:READER")[2] == 0
    for token, action in (("env:READER", ["clear", "--yes"]), ("env:WRONG", ["status"])):
        _, err, status = fleet([node], *action, token=token)
        assert status == 1 and "token" in err


def test_an_operators_socket_is_a_server_too(nodes, fleet, tmp_path, monkeypatch):
    (node,) = nodes(1)
    http = HTTP(node.served.server)
    http.open_socket(tmp_path / "operators: here")
    try:
        out, _, status = fleet([f"unix:{tmp_path / 'operators: here'}"], "status")
        assert status == 0 and str(tmp_path / "operators: here") in out
        monkeypatch.chdir(tmp_path)
        assert main(["fleet", "--server", "unix:operators: here", "status"]) == 0
    finally:
        http.close()


# -- over HTTP -------------------------------------------------------------------------------------------


@pytest.fixture
def asking(monkeypatch):
    """Has a fleet of these nodes answer at an address, which it returns."""
    monkeypatch.setenv("SERVERS", SECRET)
    with contextlib.ExitStack() as closing:

        def start(nodes, patience=HANG):
            names = tuple(getattr(node, "name", node) for node in nodes)
            settings = FleetSettings(names, token=EnvSecret("SERVERS"), patience=Seconds(patience))
            made = closing.enter_context(contextlib.closing(FleetHTTP(Fleet(settings))))
            return f"http://127.0.0.1:{made.open_port('127.0.0.1', 0)}"

        yield start


def test_every_call_of_a_server_is_answered_by_all(nodes, asking):
    made = nodes(2)
    for node in made:
        node.store()
    url = asking(made)
    bodies = {
        "/explain": {"tokens": PROMPT},
        "/arrange": {"documents": [PROMPT]},
        "/held": {},
        "/prefetch": {"tokens": PROMPT},
        "/pins/{name}": {"tokens": PROMPT},
        "/clear": {},
        "/quota": {"cache_salt": "a salt", "hard": 2 << 20},
        "/quota/model": {"model": "model", "hard": 2 << 20},
        "/erase": {"cache_salt": "a salt"},
    }
    for each in OPERATIONS:
        if each.path in ("/health", "/reload"):  # these servers have no file
            continue
        body = {"json": bodies[each.path]} if each.body else {}
        answer = httpx.request(each.method, url + each.path.format(name="system"), headers=BEARER, timeout=HANG, **body)
        told = answer.json()
        assert answer.status_code == 200 and not told["silent"] and len(told["servers"]) == 2, (each.path, told)
    assert [node.quotas.models["model"].hard for node in made] == 2 * [1 << 20]
    name = f"{url}/pins/a%20name%20%C3%BC%3F"
    assert len(httpx.put(name, json={"tokens": PROMPT}, headers=BEARER, timeout=HANG).json()["servers"]) == 2
    listed = httpx.get(f"{url}/pins", headers=BEARER, timeout=HANG).json()["servers"].values()
    assert [pin["name"] for pins in listed for pin in pins] == 2 * ["a name ü?"]
    only = httpx.post(f"{url}/clear", json={}, params={"on": made[1].name}, headers=BEARER, timeout=HANG).json()
    assert list(only["servers"]) == [made[1].name]
    assert httpx.post(f"{url}/clear", json={}, params={"on": "none"}, headers=BEARER, timeout=HANG).status_code == 409
    assert httpx.post(f"{url}/clear", json={"x": 1}, headers=BEARER, timeout=HANG).status_code == 400


def test_who_has_no_token_is_told_nothing_of_a_fleet(nodes, asking, monkeypatch):
    monkeypatch.setenv(READ_TOKEN, "read only")
    (node,) = nodes(1)
    url = asking([node])
    assert httpx.get(f"{url}/health").json() == {"alive": True}
    assert node.name not in httpx.get(url).text
    readers = {"Authorization": "Bearer read only"}
    for each in OPERATIONS:
        if each.path != "/health":
            path = url + each.path.format(name="x")
            assert httpx.request(each.method, path).status_code == 401
            status = httpx.request(each.method, path, headers=readers, timeout=HANG).status_code
            assert status == (200 if each.method == "GET" else 403)
    assert httpx.get(f"{url}/links", headers=readers).status_code == 403


@pytest.mark.skipif(not shutil.which("node"), reason="Node.js runs the script of the page")
def test_the_page_shows_the_servers_and_who_does_not_answer(nodes, asking):
    first, gone = nodes(2)
    first.store()
    gone.close()
    url = asking([first, gone])
    (link,) = httpx.get(f"{url}/links", headers=BEARER).json()
    shown = shown_by_page(link)
    assert shown["textContent"] == "1 of 2 servers answer" and shown["address"] == f"{url}/"
    assert shown["innerHTML"].count(first.name) == 1 and f"{gone.name}: no server answers" in shown["innerHTML"]
    assert "kvtier serve --link" in shown_by_page(url)["textContent"]


def test_the_command_serves_until_it_is_told_to_end(nodes, tmp_path):
    (node,) = nodes(1)
    socket_path = tmp_path / "fleet"
    command = [Path(sys.executable).with_name("kvtier"), "fleet", "--server", node.name, "serve"]
    with subprocess.Popen([*command, "--http", f"unix:{socket_path}"], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == f"operators of this user ask unix:{socket_path}\n"
        assert RunningServer.at_socket(socket_path).ask("GET", "/status")["servers"].keys() == {node.name}
        process.terminate()
        assert process.wait(HANG) == 0


# -- the file --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("written", "why"),
    [
        ({"servers": ["node-1"]}, "'node-1' is not an address"),
        ({}, "a fleet needs servers"),
        ({"servers": ["a:1"], "server": []}, "did you mean 'servers'"),
        ({"servers": ["a:1"], "models": [{"model": "m", "soft": "2B", "hard": "1B"}]}, "at most the hard one"),
        ({"servers": ["a:1"], "tenants": [{"cache_salt": "in the clear"}]}, "write env:NAME"),
        ({"servers": ["a:1"], "patience": "0s"}, "more than 0s"),
    ],
)
def test_a_wrong_file_is_refused_with_the_line(tmp_path, written, why):
    file = tmp_path / "fleet.yaml"
    file.write_text(json.dumps({"version": 1, **written}))
    with pytest.raises(ConfigError) as refused:
        load(file)
    assert why in str(refused.value) and f"{file}:1" in str(refused.value)
    assert "in the clear" not in str(refused.value)


def test_the_file_of_the_page_is_one(tmp_path):
    (block,) = re.findall(r"```yaml\n(version: 1\nservers:.*?)```", PAGE.read_text(), re.DOTALL)
    (tmp_path / "fleet.yaml").write_text(block)
    settings = load(tmp_path / "fleet.yaml")
    assert settings.models and settings.tenants and settings.pins


def test_without_servers_the_way_out_is_told(capsys, monkeypatch, tmp_path):
    assert main(["fleet", "status"]) == 2 and "--server HOST:PORT" in capsys.readouterr().err
    assert main(["fleet", "--server", "node-1", "status"]) == 2 and "not an address" in capsys.readouterr().err
    monkeypatch.setenv("KVTIER_FLEET", str(tmp_path / "none.yaml"))
    assert main(["fleet", "status"]) == 2 and "cannot be read" in capsys.readouterr().err
    for asked in (["--server", "node-1:1", "apply"], ["apply", "--on", "node-1:1"]):
        (tmp_path / "none.yaml").write_text('{"version": 1, "servers": ["node-1:1"]}')
        assert main(["fleet", *asked]) == 2 and "all servers of a file" in capsys.readouterr().err
