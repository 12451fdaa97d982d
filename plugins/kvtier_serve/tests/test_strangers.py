"""What other accounts of the machine, and whoever else reaches an address, can have from what listens: nothing."""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import httpx
import pytest
from engine_process import NAMESPACE, OWN
from patience import HANG, assert_never, wait_until
from served import LAYOUT, PATIENT, serving
from servers.kvtier import KVTIER

from kvtier_core.telemetry.metrics import METRICS
from kvtier_core.telemetry.status_server import Server as StatusServer
from kvtier_observers.endpoint import Endpoint
from kvtier_remote.client import RemoteStack
from kvtier_remote.connection import connect
from kvtier_remote.protocol import CALLS, Header, Opening, encode
from kvtier_serve.commands.serve import operators_socket
from kvtier_serve.operators import clients
from kvtier_serve.operators.access import TOKEN
from kvtier_serve.operators.console import OPERATIONS
from kvtier_serve.operators.http import HTTP
from kvtier_serve.operators.listening import LONGEST, html_page

SECRET = "a token of this test"
NOTHING = encode([])
STATUS_PAGE = html_page("kvtier serve", Path(clients.__file__).with_name("status.js")).body
STRANGER = 65534
ROUTES = [(each.method, each.path.format(name="x")) for each in OPERATIONS]
ROUTES += [("GET", path) for path in ("/", "/metrics", "/openapi.json", "/link", "/status?token=x")]

#: The whole answer of a server: a line, headers and a body.
ANSWER = re.compile(r"HTTP/1.1 (\d+) .*?\r\n\r\n(.*)", re.DOTALL)


#: The server has no files left for more connections, or none at all.
PRESSED = "no connection is accepted|Too many open files"
#: What a process of this user may do.
PROVEN = {"Authorization": f"Bearer {SECRET}"}


def listening() -> tuple[set[int], set[str]]:
    """The ports and the paths of Unix sockets on which this process listens, as the kernel has them."""
    own = {inode for number in os.listdir("/proc/self/fd") if (inode := _inode(number))}
    tcp = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    unix = [line.split(maxsplit=7) for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    listen, accepting = "0A", "00010000"
    ports = {int(words[1].rpartition(":")[2], 16) for words in tcp if words[3] == listen and words[9] in own}
    return ports, {words[7] for words in unix if words[3] == accepting and words[6] in own}


def _inode(descriptor: str) -> str:
    try:
        found = re.fullmatch(r"socket:\[(\d+)\]", os.readlink(f"/proc/self/fd/{descriptor}"))
    except FileNotFoundError:  # the descriptor that listed the folder
        return ""
    return found[1] if found else ""


@pytest.fixture
def served(tmp_path, monkeypatch):
    monkeypatch.setenv(TOKEN, SECRET)
    with serving(tmp_path, 32) as served:
        served.http = HTTP(served.server)
        served.port = served.http.open_port("127.0.0.1", 0)
        yield served
        served.http.close()


def told(doors: dict, user: int = STRANGER) -> dict[str, str]:
    """What this user gets there."""
    code = Path(__file__).with_name("stranger.py")
    done = subprocess.run([sys.executable, code, str(user)], input=json.dumps(doors), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may act as another user")
def test_every_listener_tells_a_stranger_at_most_whether_it_is_alive(monkeypatch):
    """Every socket on which parts of kvtier listen, as the kernel has them, with every route and every protocol."""
    monkeypatch.setenv(TOKEN, SECRET)
    before = listening()
    with contextlib.ExitStack() as closing:
        folder = Path(closing.enter_context(tempfile.TemporaryDirectory()))
        folder.chmod(0o755)  # others reach the sockets in it
        served = closing.enter_context(serving(folder))
        http = HTTP(served.server)
        closing.callback(http.close)
        http.open_socket(operators_socket(served.path))
        port = http.open_port("127.0.0.1", 0)
        closing.callback(StatusServer(folder / "status.sock", lambda asked: {"secret": SECRET}).close)
        closing.callback(Endpoint(0, folder / "metrics.sock").close)
        counts = Endpoint(0, ("127.0.0.1", 0))
        closing.callback(counts.close)
        ports, paths = (after - then for after, then in zip(listening(), before, strict=True))
        assert ports == {port, int(httpx.URL(counts.address).port)}
        # The kernel has the names under which they were bound.
        bound = {path.name[:-1] + "~": path for path in folder.iterdir() if path.is_socket()}
        assert {Path(path).name for path in paths} == bound.keys() and len(paths) == 4
        paths = set(map(str, bound.values()))
        answers = told({"ports": [port], "paths": sorted(paths), "routes": ROUTES})
        for path in bound.values():
            path.chmod(0o777)  # what is left is that the kernel names who asks
        opened = told({"ports": [], "paths": sorted(paths), "routes": ROUTES})
        page = told({"ports": [int(httpx.URL(counts.address).port)], "paths": [], "routes": [("GET", "/metrics")]})
    at_paths = [asked for asked in answers if asked.startswith(tuple(paths))]
    assert {answers.pop(asked) for asked in at_paths} == {"PermissionError"}
    assert not {*opened.values()} - {"", "ConnectionResetError", "BrokenPipeError"}
    for asked, answer in answers.items():
        if "b'" in asked:
            assert not answer or answer.startswith("HTTP/1.1 400 "), asked
            continue
        status, body = ANSWER.fullmatch(answer).groups()
        if asked.endswith(" GET /health"):
            assert (status, body) == ("200", '{"alive":true}')
        elif asked.endswith(" GET /"):
            assert (status, body) == ("200", STATUS_PAGE.decode("latin-1"))
        else:
            assert status in ("401", "405") and len(body) < 64, asked
    for line in (answer for asked, answer in page.items() if asked.endswith("/metrics")):
        _, body = ANSWER.fullmatch(line.replace("HTTP/1.0", "HTTP/1.1")).groups()
        families = re.findall(r"^# TYPE (\S+?)(?:_total)? ", body, re.MULTILINE)
        assert {*families} <= {metric.name.removesuffix("_total") for metric in METRICS}


def test_a_further_connection_ends_the_one_that_has_been_silent_for_longest(served, monkeypatch):
    monkeypatch.setattr(clients, "PATIENCE", HANG)
    with contextlib.ExitStack() as closing:
        silent = [closing.enter_context(socket.create_connection(("127.0.0.1", served.port))) for _ in range(70)]
        assert httpx.get(f"http://127.0.0.1:{served.port}/health", trust_env=False).status_code == 200
        for each in silent:
            each.setblocking(False)
        assert [ended(each) for each in silent] == [True] * 7 + [False] * 63
        silent[-1].setblocking(True)
        silent[-1].sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert silent[-1].recv(1 << 10).startswith(b"HTTP/1.1 200"), "the last ones stay"


def ended(client: socket.socket) -> bool:
    """Has the server hung up?"""
    try:
        return client.recv(1) == b""
    except BlockingIOError:
        return False
    except ConnectionResetError:
        return True


def test_a_connection_that_asks_nothing_ends(served, monkeypatch):
    monkeypatch.setattr(clients, "PATIENCE", 0.2)
    for begun in (b"", b"GET / HT", b"POST /explain HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n"):
        with socket.create_connection(("127.0.0.1", served.port)) as client:
            client.settimeout(HANG)
            client.sendall(begun.replace(b"\r\n\r\n", f"\r\nAuthorization: Bearer {SECRET}\r\n\r\n".encode()))
            assert ended(client)


def test_a_connection_that_takes_no_answers_ends(served, monkeypatch):
    monkeypatch.setattr(clients, "PATIENCE", 0.2)
    page = f"GET / HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {SECRET}\r\n\r\n".encode()
    with socket.create_connection(("127.0.0.1", served.port)) as client:
        client.settimeout(HANG)
        with pytest.raises(OSError, match=r"(?i)reset|broken"):
            while True:
                client.sendall(100 * page)


def test_connections_beyond_the_pace_wait_in_the_kernel(served, monkeypatch):
    monkeypatch.setattr(clients, "_PACE", 1 / HANG)
    with contextlib.ExitStack() as closing:
        first, second, third = (
            closing.enter_context(socket.create_connection(("127.0.0.1", served.port))) for _ in range(3)
        )
        for each in (first, second, third):
            each.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            each.setblocking(False)
        wait_until(lambda: _received(first))
        assert_never(lambda: _received(second) or _received(third))


def _received(client: socket.socket) -> bytes:
    with contextlib.suppress(BlockingIOError):
        return client.recv(1 << 10)
    return b""


def test_a_head_without_end_is_refused(served):
    with socket.create_connection(("127.0.0.1", served.port)) as client:
        client.settimeout(HANG)
        with contextlib.suppress(ConnectionError):
            client.sendall(b"GET / HTTP/1.1\r\nX: " + bytes(1 << 20).replace(b"\0", b"x"))
        with contextlib.suppress(ConnectionResetError):
            assert client.recv(1 << 10).startswith(b"HTTP/1.1 400")


@pytest.mark.parametrize("pieces", [False, True])
def test_a_body_is_read_as_far_as_the_longest_prompt(served, pieces):
    body = b"[" * (LONGEST + 1)
    answer = httpx.post(
        f"http://127.0.0.1:{served.port}/explain",
        content=iter([body[: LONGEST // 2], body[LONGEST // 2 :]]) if pieces else body,
        headers=PROVEN,
        trust_env=False,
        timeout=HANG,
    )
    assert answer.status_code == 413 and str(LONGEST) in answer.json()["error"]


def test_the_body_of_a_stranger_is_not_read(served):
    head = b"POST /explain HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1073741824\r\n\r\n"
    with socket.create_connection(("127.0.0.1", served.port)) as client:
        client.settimeout(HANG)
        client.sendall(head)
        sent = 0
        with pytest.raises(ConnectionError):
            while sent < 1 << 30:
                sent += client.send(bytes(1 << 20))
    assert sent < 64 << 20, "as much as two sockets hold"


def test_wrong_tokens_are_one_line_of_the_log(served, caplog):
    wrong = {"Authorization": "Bearer hunter2"}
    for _ in range(10):
        assert httpx.get(f"http://127.0.0.1:{served.port}/status", headers=wrong, trust_env=False).status_code == 401
    assert [record.getMessage() for record in caplog.records] == ["kvtier: operators: 127.0.0.1: a wrong token"]


GARBAGE = [
    b"GET / HTTP/1.1\r\n\r\n",
    b"GET / HTTP/1.0\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: [\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: a:b:c\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: \xff\r\n\r\n",
    b"GET http://[ HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"GET //[/status HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"GET /%ff%00 HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"OPTIONS * HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"CONNECT a:1 HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"GET /status HTTP/1.1\r\nHost: localhost\r\nAuthorization: Basic \xff\r\n\r\n",
    b"GET /status HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: upgrade\r\n\r\n",
    b"POST /explain HTTP/1.1\r\nHost: localhost\r\nContent-Length: x\r\n\r\n",
    b"POST /explain HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nx\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
]


@pytest.mark.parametrize("garbage", GARBAGE)
def test_what_a_stranger_sends_writes_nothing_to_the_log(served, caplog, monkeypatch, garbage):
    monkeypatch.setattr(clients, "PATIENCE", 1.0)  # some of this is the beginning of a request
    with socket.create_connection(("127.0.0.1", served.port)) as client:
        client.settimeout(HANG)
        client.sendall(garbage)
        with contextlib.suppress(ConnectionResetError):
            answer = b"".join(iter(lambda: client.recv(1 << 16), b""))
            assert not answer or re.match(rb"HTTP/1.1 (200|400|401|403|405) ", answer)
    httpx.get(f"http://127.0.0.1:{served.port}/health", trust_env=False)
    assert not caplog.records


def test_files_that_come_with_a_message_are_closed_unread(served):
    """A process of this user may send open files, which would take those of the server."""
    engine = connect(served.path)

    def answers_to(number: int, files: list[int]) -> None:
        for each in range(number):
            engine.send(Header(len(NOTHING), each, CALLS["detach"].number, 0, 0), NOTHING, files)
        answers = 0
        while answers < number:
            engine.wait(HANG)
            answers += len(list(engine.receive()))

    answers_to(1, [])
    before = len(os.listdir("/proc/self/fd"))
    answers_to(50, [0] * 16)
    assert len(os.listdir("/proc/self/fd")) <= before
    engine.close()


def test_whoever_floods_it_leaves_files_for_stores_and_operators(tmp_path):
    """Connections of this user to each socket, until the server accepts no more."""
    file, path, log = tmp_path / "tiers.yaml", tmp_path / "s", tmp_path / "log"
    disk = f"{{type: disk, path: {tmp_path}/frames, capacity: 8MiB, min_free: 0B}}"
    file.write_text(f"version: 1\ntiers:\n  - {{type: cpu, capacity: 1MiB, huge_pages: off}}\n  - {disk}\n")
    command = (KVTIER, "serve", "--config", file, "--socket", path, "--http", "127.0.0.1:0")
    with contextlib.ExitStack() as closing:
        few = {"preexec_fn": lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))}
        few["stderr"] = closing.enter_context(log.open("w"))
        running = closing.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, **few))
        closing.callback(running.terminate)
        port = next(found for line in running.stdout if (found := re.search(r"ask 127.0.0.1:(\d+)", line)))[1]
        stack = RemoteStack(path, Opening("model", "engine", NAMESPACE, LAYOUT), PATIENT)
        closing.callback(stack.close)
        for family, address in ((socket.AF_INET, ("127.0.0.1", int(port))), (socket.AF_UNIX, str(path))):
            for _ in range(180):
                flood = closing.enter_context(socket.socket(family))
                flood.setblocking(False)
                with contextlib.suppress(BlockingIOError):
                    flood.connect(address)
        wait_until(lambda: re.search(PRESSED, log.read_text()))
        stack.reserve(OWN, "store")
        stack.commit("store")
        stack.drain(HANG)
        with httpx.Client(transport=httpx.HTTPTransport(uds=f"{path}.http"), timeout=HANG) as client:
            (space,) = client.get("http://kvtier/status").json()["namespaces"]
            assert client.post("http://kvtier/clear", json={}).json() == {"chunks": 6}
        assert [tier["chunks"] for tier in space["tiers"]] == [6, 6]
        assert "Too many open files" not in log.read_text()
