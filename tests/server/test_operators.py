"""What operators ask over HTTP, by a client that is made from the OpenAPI description."""

from __future__ import annotations

import os
import threading

import httpx
import jsonschema
import pytest
from engine_process import OWN
from patience import HANG
from served import LAYOUT, serving

from kvtier_core.builtin.chained import Chained
from kvtier_core.errors import ContractError
from kvtier_core.server.http import HTTP, TOKEN
from kvtier_core.types import Slot

SECRET = "a token of this test"
PROMPT = list(range(3 * LAYOUT.tokens))


#: Store tiers, by type.
TIERS = {"disk": {"path": "disk", "min_free": "0B"}, "gds": {"paths": ["slabs"], "mode": "gds"}}


@pytest.fixture
def served(tmp_path, monkeypatch, request):
    monkeypatch.setenv(TOKEN, SECRET)
    monkeypatch.chdir(tmp_path)
    type = getattr(request, "param", "disk")
    with serving(tmp_path, 32, {"type": type, "capacity": "8MiB", **TIERS[type]}) as served:
        http = HTTP(served.server, "127.0.0.1", 0)
        served.url = f"http://127.0.0.1:{http.port}"
        yield served
        http.close()


class Client:
    """Calls operations by their ids, and compares each answer with its schema."""

    def __init__(self, url, token=SECRET):
        self._url = url
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._whole = self._ask("GET", "/openapi.json").json()
        self._operations = {
            told["operationId"]: (method, path, told)
            for path, methods in self._whole["paths"].items()
            for method, told in methods.items()
        }

    def _ask(self, method, path, **more):
        return httpx.request(method, self._url + path, headers=self._headers, trust_env=False, **more)

    def __call__(self, operation, body=None, status=200, **parameters):
        method, path, told = self._operations[operation]
        more = {} if body is None else {"json": body}
        response = self._ask(method, path.format(**parameters), **more)
        assert response.status_code == status, response.text
        if status == 200:
            schema = told["responses"]["200"]["content"]["application/json"]["schema"]
            jsonschema.validate(response.json(), {**schema, "components": self._whole["components"]})
        return response.json()


def stored(served, tokens=PROMPT, salt=b""):
    """An engine has stored the chunks of a prompt."""
    stack = served.stack()
    namespace = next(iter(served.server.spaces)).namespace
    path = Chained(namespace, LAYOUT.tokens).keys(tokens, salt=salt)
    stack.reserve(path, "store", salt)
    stack.commit("store")
    stack.drain(10)
    return stack, path


def test_health_is_the_progress_of_the_owner(served):
    client = Client(served.url)
    served.stack()
    assert client("health")["sessions"] == 1
    hangs, goes_on = threading.Event(), threading.Event()

    def hang():
        hangs.set()
        goes_on.wait(HANG)

    served.server.ask(hang)
    hangs.wait(HANG)
    assert "no progress" in client("health", status=503)["error"]
    goes_on.set()
    assert client("health")["boot"] == f"{served.server.boot:x}"


def test_the_status_has_memory_tiers_and_engines(served):
    stored(served)
    told = Client(served.url)("status")
    (space,), (engine,) = told["namespaces"], told["engines"]
    assert (
        [tier["chunks"] for tier in space["tiers"]] == [3, 3]
        and engine["name"] == "model, engine engine"
        and space["model"] == "model"
    )
    assert space["tiers"][1]["events"]["written"]["chunks"] == 3
    assert 0 < told["memory"][0]["free"] < told["memory"][0]["nbytes"]


def test_the_hit_rate_is_that_of_requests_that_are_done(served):
    stack, path = stored(served)
    for number in range(2):
        stack.lookup([*path, OWN[0]], f"request {number}")
        stack.lookup([*path, OWN[0]], f"request {number}")  # it asks again, as a request that waits does
    stack.release("request 0")
    stack.drain(5)
    (space,) = Client(served.url)("status")["namespaces"]
    assert (space["asked"], space["found"]) == (4, 3)


def test_metrics_count_what_happened(served):
    stored(served)
    lines = httpx.get(f"{served.url}/metrics", trust_env=False).text.splitlines()
    assert 'kvtier_chunks_total{engine="1",event="written",tier="disk"} 3.0' in lines


def test_a_prompt_is_explained_by_its_tokens_and_salt(served):
    stored(served, salt=b'{"cache_salt": "tenant"}')
    client = Client(served.url)
    told = client("explain", {"tokens": PROMPT, "cache_salt": "tenant"})
    assert [chunk["tiers"] for chunk in told["chunks"]] == [["cpu", "disk"]] * 3
    assert not any(chunk["tiers"] for chunk in client("explain", {"tokens": PROMPT})["chunks"])


@pytest.mark.parametrize("served", TIERS, indirect=True)
@pytest.mark.parametrize("how", ["prefetch", "pin"])
def test_a_prompt_is_brought_into_memory_ahead_of_its_request(served, how):
    """Also where an engine's workers would read it by themselves."""
    stack, path = stored(served)
    client = Client(served.url)
    assert client("clear", {}) == {"chunks": 3}
    client(how, {"tokens": PROMPT}, **({"name": "system"} if how == "pin" else {}))
    stack.drain(10)
    slots = stack.lookup(path, "request").slots
    assert len(slots) == 3 and all(isinstance(slot, Slot) for slot in slots)


def test_a_pinned_prompt_stays_until_its_pin_is_deleted(served):
    stack, path = stored(served)
    client = Client(served.url)
    assert client("pin", {"tokens": PROMPT}, name="system") == {"chunks": 3}
    assert client("clear", {}) == {"chunks": 0} and len(stack.lookup(path, "request").slots) == 3
    stack.release("request")
    stack.drain(5)
    assert client("unpin", name="system") == {"chunks": 3}
    assert client("clear", {}) == {"chunks": 3}


def test_pins_take_a_quarter_of_the_memory_at_most(served):
    stored(served, list(range(30 * LAYOUT.tokens)))
    told = Client(served.url)("pin", {"tokens": list(range(30 * LAYOUT.tokens))}, name="long")
    arena = next(iter(served.server.spaces)).stack.arenas[0]
    assert told["chunks"] == arena.capacity // 4


@pytest.mark.parametrize("token", ["", "another"])
def test_requests_that_change_something_need_the_token(served, token):
    stored(served)
    client = Client(served.url, token)
    for operation, body in {
        "clear": {},
        "prefetch": {"tokens": PROMPT},
        "pin": {"tokens": PROMPT},
        "unpin": None,
    }.items():
        assert "token" in client(operation, body, status=401, name="x")["error"]
    assert client("health")["sessions"] == 1


def test_without_a_token_nothing_can_be_changed(tmp_path, monkeypatch):
    monkeypatch.delenv(TOKEN, raising=False)
    with serving(tmp_path) as served:
        http = HTTP(served.server, "127.0.0.1", 0)
        assert TOKEN in Client(f"http://127.0.0.1:{http.port}", "")("clear", {}, status=403)["error"]
        with pytest.raises(ContractError, match=TOKEN):
            HTTP(served.server, "0.0.0.0", 0)
        http.close()


def test_beyond_loopback_everything_needs_the_token(served):
    http = HTTP(served.server, "0.0.0.0", 0)
    url = f"http://127.0.0.1:{http.port}"
    for path in ("/", "/health", "/status", "/metrics", "/openapi.json"):
        assert httpx.get(url + path, trust_env=False).status_code == 401
        assert httpx.get(url + path, trust_env=False, headers={"Authorization": f"Bearer {SECRET}"}).status_code == 200
    http.close()


def test_a_page_of_another_site_learns_nothing(served):
    answer = httpx.get(f"{served.url}/status", trust_env=False, headers={"Host": "elsewhere.example"})
    assert answer.status_code == 403


@pytest.mark.parametrize(
    "body",
    ["", "[]", "{", '{"tokens": ["a"]}', '{"tokens": [-1]}', '{"tokens": [4294967296]}', '{"tokens": [], "x": 1}'],
)
def test_a_request_that_is_not_understood_gets_an_explanation(served, body):
    served.stack()
    answer = httpx.post(
        f"{served.url}/explain", content=body, trust_env=False, headers={"Authorization": f"Bearer {SECRET}"}
    )
    assert answer.status_code == 400 and answer.json()["error"]


def test_a_namespace_must_be_named_where_there_are_several(served):
    served.stack("a")
    served.stack("b")
    client = Client(served.url)
    assert "2 namespaces" in client("explain", {"tokens": PROMPT}, status=409)["error"]
    first = client("status")["namespaces"][0]["namespace"]
    assert client("explain", {"tokens": PROMPT, "namespace": first[:16]})["chunks"]


def test_no_answer_reveals_a_key_that_was_not_in_the_request(served):
    stored(served)
    told = httpx.get(f"{served.url}/status", trust_env=False).text
    told += httpx.get(f"{served.url}/metrics", trust_env=False).text
    path = Chained(next(iter(served.server.spaces)).namespace, LAYOUT.tokens).keys(PROMPT)
    assert not any(key.hex() in told for key in [*path, *OWN]) and os.environ[TOKEN] not in told
