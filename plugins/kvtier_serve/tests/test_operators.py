"""What operators ask over HTTP, by a client that is made from the OpenAPI description."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import shutil
import ssl
import threading
import time
from urllib.parse import quote

import httpx
import jsonschema
import pytest
from engine_process import OWN
from outsiders import TEXTS, assert_tame
from patience import HANG, wait_until
from served import LAYOUT, keys_of, serving
from servers.redis import make_certificate
from shown_page import shown_by_page

from kvtier_core.errors import ContractError
from kvtier_core.outside import stand_in
from kvtier_core.types import Slot
from kvtier_serve.lent_arena import LentArena
from kvtier_serve.operators.access import READ_TOKEN, TOKEN, token_of
from kvtier_serve.operators.console import OPERATIONS
from kvtier_serve.operators.http import _PROGRESS, HTTP

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
        served.http = HTTP(served.server)
        served.url = f"http://127.0.0.1:{served.http.open_port('127.0.0.1', 0)}"
        yield served
        served.http.close()


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
        return httpx.request(method, self._url + path, headers=self._headers, trust_env=False, timeout=HANG, **more)

    def __call__(self, operation, body=None, status=200, **parameters):
        method, path, told = self._operations[operation]
        more = {} if body is None else {"json": body}
        response = self._ask(method, path.format(**parameters), **more)
        assert response.status_code == status, response.text
        if status == 200:
            schema = told["responses"]["200"]["content"]["application/json"]["schema"]
            jsonschema.validate(response.json(), {**schema, "components": self._whole["components"]})
        return response.json()


@contextlib.contextmanager
def held(served):
    """The owner answers nothing in this context."""
    hangs, goes_on = threading.Event(), threading.Event()

    def hang():
        hangs.set()
        goes_on.wait(HANG)

    served.server.ask(hang)
    assert hangs.wait(HANG)
    yield
    goes_on.set()


def asked(served, path):
    return httpx.get(served.url + path, trust_env=False, headers={"Authorization": f"Bearer {SECRET}"})


@contextlib.contextmanager
def disk_held(served):
    """The disk reads nothing in this context."""
    (space,) = served.server.spaces
    backend, goes_on = space.stack.tiers[0].backend, threading.Event()
    reads = backend.read

    def read(*arguments):
        assert goes_on.wait(HANG)
        return reads(*arguments)

    backend.read = read
    try:
        yield
    finally:
        goes_on.set()


def stored(served, tokens=PROMPT, salt=b""):
    """An engine has stored the chunks of a prompt."""
    stack = served.stack()
    namespace = next(iter(served.server.spaces)).namespace
    path = keys_of(namespace, tokens, salt)
    stack.reserve(path, "store", salt)
    stack.commit("store")
    stack.drain(HANG)
    return stack, path


def test_health_is_the_progress_of_the_owner(served):
    client = Client(served.url)
    served.stack()
    assert client("health")["sessions"] == 1
    with held(served):
        assert "no progress" in client("health", status=503)["error"]
    assert client("health")["boot"] == f"{served.server.boot:x}"


def test_a_call_that_was_answered_503_is_not_carried_out_later(served):
    stored(served)
    client = Client(served.url)
    with held(served):
        client("clear", {}, status=503)
    assert client("status")["namespaces"][0]["tiers"][0]["chunks"] == 3


def test_a_call_that_the_owner_has_begun_is_answered_when_it_is_done(served, monkeypatch):
    """However long it takes: 503 would say that it was not carried out."""
    stored(served)
    client = Client(served.url)
    unhurried = LentArena.drop

    def drop(arena, keys):
        time.sleep(2 * _PROGRESS)
        return unhurried(arena, keys)

    monkeypatch.setattr(LentArena, "drop", drop)
    assert client("clear", {}) == {"chunks": 3}


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
    stack.drain(HANG)
    (space,) = Client(served.url)("status")["namespaces"]
    assert (space["asked"], space["found"]) == (4, 3)


def test_metrics_count_what_happened(served):
    stored(served)
    lines = asked(served, "/metrics").text.splitlines()
    assert 'kvtier_chunks_total{event="written",model="model",tier="disk"} 3.0' in lines


def test_a_prompt_is_explained_by_its_tokens_and_salt(served):
    stored(served, salt=b'{"cache_salt": "tenant"}')
    client = Client(served.url)
    told = client("explain", {"tokens": PROMPT, "cache_salt": "tenant"})
    assert [chunk["tiers"] for chunk in told["chunks"]] == [["cpu", "disk"]] * 3
    assert not any(chunk["tiers"] for chunk in client("explain", {"tokens": PROMPT})["chunks"])


def test_documents_are_arranged_in_the_order_that_the_tenant_has_stored(served):
    before, *documents = PROMPT[:4], PROMPT[4:20], PROMPT[20:44], PROMPT[44:]
    asked = {"before": before, "documents": documents[::-1], "after": [7] * 16}
    stored(served, salt=b'{"cache_salt": "tenant"}')
    client = Client(served.url)
    told = client("arrange", {**asked, "cache_salt": "tenant"})
    assert told["best"] == {"documents": [2, 1, 0], "cached_tokens": len(PROMPT)} and told["exhaustive"]
    assert told["requested"] == {"documents": [0, 1, 2], "cached_tokens": 0}
    assert [each["cached_tokens"] for each in told["by_first_document"]] == [len(PROMPT), 0, 0]
    assert client("arrange", asked)["best"] == told["requested"], "without the salt"
    client("arrange", {**asked, "documents": []}, status=400)


@pytest.mark.parametrize("served", TIERS, indirect=True)
@pytest.mark.parametrize("how", ["prefetch", "pin"])
def test_a_prompt_is_brought_into_memory_ahead_of_its_request(served, how):
    """Also where an engine's workers would read it by themselves."""
    stack, path = stored(served)
    client = Client(served.url)
    assert client("clear", {}) == {"chunks": 3}
    client(how, {"tokens": PROMPT}, **({"name": "system"} if how == "pin" else {}))
    stack.drain(HANG)
    slots = stack.lookup(path, "request").slots
    assert len(slots) == 3 and all(isinstance(slot, Slot) for slot in slots)


def test_a_pinned_prompt_stays_until_its_pin_is_deleted(served):
    stack, path = stored(served)
    client = Client(served.url)
    told = client("pin", {"tokens": PROMPT}, name="system")
    assert told == {"chunks": 3, "pending": 0, "left_out": 0, "seconds": 86400}
    assert client("clear", {}) == {"chunks": 0} and len(stack.lookup(path, "request").slots) == 3
    stack.release("request")
    stack.drain(HANG)
    assert client("unpin", name="system") == {"chunks": 3}
    assert client("clear", {}) == {"chunks": 3}


def test_a_pin_of_a_prompt_on_disk_tells_what_it_keeps_now_and_what_will_follow(served):
    stored(served)
    client = Client(served.url)
    client("clear", {})
    with disk_held(served):
        assert client("pin", {"tokens": PROMPT, "seconds": 60}, name="system") == {
            "chunks": 0, "pending": 3, "left_out": 0, "seconds": 60,
        }  # fmt: skip
        (pin,) = client("pins")
        assert (pin["name"], pin["model"], pin["chunks"], pin["slots"], pin["pending"]) == (
            "system", "model", 3, 0, True,
        )  # fmt: skip
        assert 0 < pin["seconds"] <= 60
    wait_until(lambda: client("pins")[0]["slots"] == 3)
    assert not client("pins")[0]["pending"]


def test_a_pin_expires(served):
    stored(served)
    client = Client(served.url)
    client("pin", {"tokens": PROMPT, "seconds": 0.01}, name="short")
    client("pin", {"tokens": PROMPT[: LAYOUT.tokens]}, name="long")
    wait_until(lambda: [pin["name"] for pin in client("pins")] == ["long"])
    assert client("clear", {}) == {"chunks": 2}


def test_a_pin_of_the_same_name_replaces_one_in_another_namespace(served):
    stored(served)
    client = Client(served.url)
    client("pin", {"tokens": PROMPT}, name="system")
    served.stack("another")
    (first, second) = client("status")["namespaces"]
    assert client("pin", {"tokens": PROMPT, "namespace": "none"}, name="system", status=409)
    assert client("pins")[0]["slots"] == 3, "what is refused changes nothing"
    client("pin", {"tokens": PROMPT, "namespace": second["namespace"]}, name="system")
    assert [pin["namespace"] for pin in client("pins")] == [second["number"]]
    assert client("clear", {"namespace": first["namespace"]}) == {"chunks": 3}


@pytest.mark.parametrize("seconds", [0, -1, 1e9, float("inf")])
def test_a_pin_lasts_neither_for_ever_nor_not_at_all(served, seconds):
    served.stack()
    content = json.dumps({"tokens": PROMPT, "seconds": seconds})
    answer = httpx.put(
        f"{served.url}/pins/x", content=content, trust_env=False, headers={"Authorization": f"Bearer {SECRET}"}
    )
    assert answer.status_code == 400 and not Client(served.url)("pins")


def test_a_prefetch_tells_how_many_chunks_come_up(served):
    stored(served)
    client = Client(served.url)
    unknown = [token + 1 for token in PROMPT]
    assert client("prefetch", {"tokens": unknown}) == {"chunks": 0, "in_memory": 0, "asked": []}
    assert client("prefetch", {"tokens": PROMPT}) == {"chunks": 0, "in_memory": 3, "asked": []}
    client("clear", {})
    with disk_held(served):
        assert client("prefetch", {"tokens": PROMPT}) == {"chunks": 3, "in_memory": 0, "asked": []}


def test_what_memory_has_is_named_with_the_beginnings_of_prompts_first(served):
    stack, path = stored(served)
    client = Client(served.url)
    keys = [key.hex() for key in path]
    assert client("held", {}) == {"chunks": [[keys[0], -1], [keys[1], 0], [keys[2], 1]], "left_out": 0}
    assert client("held", {"most": 2}) == {"chunks": [[keys[0], -1], [keys[1], 0]], "left_out": 1}
    namespace = next(iter(served.server.spaces)).namespace
    other = keys_of(namespace, [*PROMPT[: LAYOUT.tokens], *PROMPT[: LAYOUT.tokens]])
    stack.reserve(other, "other")
    stack.commit("other")
    stack.reserve(keys_of(namespace, [7, *PROMPT]), "being filled")
    chunks = client("held", {})["chunks"]
    assert sorted(chunks) == sorted([[keys[0], -1], [keys[1], 0], [other[1].hex(), 0], [keys[2], 1]])


def test_a_prompt_is_named_by_its_tokens_or_by_its_keys(served):
    _, path = stored(served)
    client, keys = Client(served.url), [key.hex() for key in path]
    for call in ("explain", "prefetch"):
        assert client(call, {"keys": keys}) == client(call, {"tokens": PROMPT})
    assert client("prefetch", {"keys": keys[1:]})["in_memory"] == 2
    for wrong, status in (
        ({}, 409),
        ({"keys": keys, "tokens": PROMPT}, 409),
        ({"keys": [keys[0], keys[0]]}, 409),
        ({"keys": [keys[0][:-1]]}, 400),
        ({"keys": [keys[0].upper() + "\n"]}, 400),
    ):
        headers = {"Authorization": f"Bearer {SECRET}"}
        answer = httpx.post(f"{served.url}/prefetch", json=wrong, trust_env=False, headers=headers)
        assert answer.status_code == status, wrong


def test_each_change_is_logged_with_who_made_it_and_without_salts(served, caplog, tmp_path):
    caplog.set_level("INFO", "kvtier")
    stored(served, salt=b'{"cache_salt": "a salt"}')
    served.http.open_socket(tmp_path / "http")
    prompt = {"tokens": PROMPT, "cache_salt": "a salt"}
    calls = [
        ("POST", "/prefetch", prompt, "in_memory 3"),
        ("PUT", "/pins/system", prompt, 'name "system", tenant'),
        ("PUT", "/quota", {"cache_salt": "a salt", "hard": 1 << 30}, f"hard {1 << 30}"),
        ("PUT", "/quota", {"cache_salt": "a salt", "hard": 0}, "hard 0"),
        ("PUT", "/quota", {"cache_salt": "a salt"}, "tenant"),
        ("DELETE", "/pins/system", None, 'name "system", chunks 3'),
        ("POST", "/clear", {}, "chunks "),
        ("POST", "/erase", {"cache_salt": "a salt"}, "deleted {"),
    ]
    with httpx.Client(transport=httpx.HTTPTransport(uds=str(tmp_path / "http")), base_url="http://here") as client:
        for method, path, body, _ in calls:
            assert client.request(method, path, json=body, timeout=HANG).status_code == 200
        assert client.post("/erase", json={}, timeout=HANG).status_code == 409
        assert client.get("/status", timeout=HANG).status_code == 200
    Client(served.url)("clear", {})
    lines = [line for line in caplog.messages if "operator" in line]
    for line, (method, _, _, facts) in zip(lines, calls, strict=False):
        assert f"operator user {os.getuid()}, process {os.getpid()}: {method}" in line and facts in line
    assert len(lines) == len(calls) + 1 and "operator 127.0.0.1: POST /clear" in lines[-1]
    tenant = next(iter(served.server.spaces)).tenants.name(b'{"cache_salt": "a salt"}')
    assert "a salt" not in caplog.text and sum(f'tenant "{tenant}"' in line for line in lines) == 6
    assert str(PROMPT[:9])[1:-1] not in caplog.text


@pytest.mark.parametrize("text", [text[:9999] for text in TEXTS.values() if "\ud800" not in text])
def test_what_clients_and_engines_name_forges_no_line(served, caplog, text):
    caplog.set_level("INFO", "kvtier")
    stored(served)
    served.stack(f"model {text}")
    served.stack().stop_direct_reads("disk", text)
    wait_until(lambda: "pass through an arena" in caplog.text)
    client = Client(served.url)
    client("pin", {"tokens": PROMPT, "seconds": 60, **_of_model(client, "model")}, name=quote(text, safe=""))
    (pin,) = client("pins")
    assert_tame(pin["name"], *(each["name"] for each in client("status")["engines"]), longest=5000)
    client("unpin", name=quote(pin["name"], safe=""))
    assert client("pins") == []
    assert sum("operator" in line for line in caplog.messages) == 2
    assert_tame(*caplog.messages, longest=5000)


def _of_model(client, model):
    (found,) = (each["namespace"] for each in client("status")["namespaces"] if each["model"] == model)
    return {"namespace": found}


def test_a_long_salt_is_the_one_that_engines_make(served):
    salts = [TEXTS["long"], TEXTS["long"] + "y"]
    made = [json.dumps({"cache_salt": stand_in(salt)}).encode() for salt in salts]
    stored(served, salt=made[0])
    client = Client(served.url)
    client("set_quota", {"cache_salt": salts[1], "hard": 0})
    assert {each["nbytes"] > 0 for each in client("tenants")} == {True}
    client("set_quota", {"cache_salt": salts[0], "hard": 0})
    wait_until(lambda: client("tenants") == [])


def test_pins_take_a_quarter_of_the_memory_at_most_and_those_of_a_tenant_half_of_that(served):
    long = list(range(10 * LAYOUT.tokens))
    stored(served, long), stored(served, long, salt=b'{"cache_salt": "tenant"}')
    client, quarter = Client(served.url), next(iter(served.server.spaces)).stack.arenas[0].capacity // 4
    told = [client("pin", {"tokens": long}, name="long")]
    told += [client("pin", {"tokens": long, "cache_salt": "tenant"}, name=name) for name in ("other", "another")]
    assert [each["chunks"] for each in told] == [quarter // 2, quarter // 2, 0]


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
@pytest.mark.parametrize("token", ["", "another", "é"])
def test_nothing_is_answered_without_the_token_but_whether_it_is_alive(served, host, token):
    stored(served)
    url = f"http://127.0.0.1:{served.http.open_port(host, 0)}"
    headers = {"Authorization": f"Bearer {token}".encode("latin-1")} if token else {}
    routes = [(each.method, each.path) for each in OPERATIONS if each.path != "/health"]
    for method, path in [*routes, ("GET", "/metrics"), ("GET", "/openapi.json"), ("GET", "/none")]:
        answer = httpx.request(method, url + path.format(name="x"), headers=headers, trust_env=False, content="{}")
        assert (answer.status_code, answer.json()) == (401, {"error": "this needs the token"})
        assert answer.headers["Connection"] == "close", "who asks again is accepted again, at the pace of all"
    assert httpx.get(f"{url}/health", headers=headers, trust_env=False).json() == {"alive": True}
    assert Client(url)("health")["sessions"] == 1


@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER"])
def test_the_scheme_of_the_token_has_letters_of_any_case(served, scheme):
    headers = {"Authorization": f"{scheme} {SECRET}"}
    assert httpx.get(f"{served.url}/status", headers=headers, trust_env=False).status_code == 200


@pytest.mark.parametrize("written", [SECRET, f"Basic {SECRET}", f"Bearer{SECRET}", "Bearer", "Bearer  x"])
def test_a_token_of_another_form_is_refused(served, written):
    assert httpx.get(f"{served.url}/status", headers={"Authorization": written}, trust_env=False).status_code == 401


def test_without_a_token_in_the_environment_this_user_has_one_on_loopback_alone(tmp_path, monkeypatch):
    monkeypatch.delenv(TOKEN, raising=False)
    with serving(tmp_path) as served:
        http = HTTP(served.server)
        url = f"http://127.0.0.1:{http.open_port('127.0.0.1', 0)}"
        assert Client(url, token_of("127.0.0.1"))("clear", {}) == {"chunks": 0}
        with pytest.raises(ContractError, match=TOKEN):
            http.open_port("0.0.0.0", 0)
        http.close()


@pytest.mark.skipif(not shutil.which("node"), reason="Node.js runs the script of the page")
@pytest.mark.parametrize("known", [True, False])
def test_the_link_to_the_page_has_the_token_in_it(served, known):
    """The script takes it from where no server sees it, out of the address bar, and sends it."""
    (link,) = asked(served, "/links").json()
    shown = shown_by_page(link if known else served.url)
    assert shown["address"] == f"{served.url}/" and bool(shown["className"]) is not known
    assert ("0 engines" if known else "kvtier serve --link") in shown["textContent"]


@pytest.mark.skipif(not shutil.which("node"), reason="Node.js runs the script of the page")
def test_the_page_says_how_many_tenants_it_leaves_out(served):
    for number in range(15):
        salt = json.dumps({"cache_salt": str(number)}).encode()
        stack, path = stored(served, [number] * LAYOUT.tokens, salt)
        for _ in range(2):  # only who comes back is a tenant
            stack.on_request(path, salt=salt)
        stack.drain(HANG)
    (link,) = asked(served, "/links").json()
    shown = shown_by_page(link)
    assert "and 3 more with less" in shown["innerHTML"]


def test_a_token_for_reading_changes_and_confirms_nothing(served, monkeypatch):
    """Explaining a prompt confirms that it was asked."""
    monkeypatch.setenv(READ_TOKEN, "another")
    url = f"http://127.0.0.1:{served.http.open_port('127.0.0.1', 0)}"
    headers = {"Authorization": "Bearer another"}
    for each in OPERATIONS:
        answer = httpx.request(each.method, url + each.path.format(name="x"), headers=headers, trust_env=False)
        assert answer.status_code == (200 if each.method == "GET" else 403), each
    assert httpx.get(f"{url}/metrics", headers=headers, trust_env=False).status_code == 200
    links = httpx.get(f"{url}/links", headers=headers, trust_env=False)
    assert links.status_code == 403 and SECRET not in links.text
    assert Client(url)("clear", {}) == {"chunks": 0}


def test_with_a_certificate_it_speaks_tls_alone(served, tmp_path, caplog):
    make_certificate(tmp_path)
    port = served.http.open_port("127.0.0.1", 0, str(tmp_path / "ca.pem"), str(tmp_path / "key.pem"))
    trust = ssl.create_default_context(cafile=tmp_path / "ca.pem")
    answer = httpx.get(f"https://127.0.0.1:{port}/links", verify=trust, headers={"Authorization": f"Bearer {SECRET}"})
    assert answer.json()[-1].startswith(f"https://127.0.0.1:{port}/#")
    with pytest.raises(httpx.HTTPError):
        httpx.get(f"http://127.0.0.1:{port}/health", trust_env=False)
    with pytest.raises(ContractError, match=r"cannot use the certificate .*key\.pem and its key"):
        served.http.open_port("127.0.0.1", 0, str(tmp_path / "key.pem"))
    gc.collect()  # a connection that ended with an error has it logged
    assert not caplog.records


def test_the_description_has_every_route_with_the_refusals_of_each(served):
    described = asked(served, "/openapi.json").json()
    paths = described["paths"]
    assert {*paths} == {each.path for each in OPERATIONS} | {"/", "/metrics", "/openapi.json", "/links"}
    for path, methods in paths.items():
        for method, told in methods.items():
            answer = httpx.request(method, served.url + path.format(name="x"), trust_env=False)
            assert (str(answer.status_code) == "401") is ("security" in told) is ("401" in told["responses"]), path
    assert {*paths["/explain"]["post"]["responses"]} == {"200", "400", "401", "403", "409", "413", "503"}
    refused = httpx.post(f"{served.url}/explain", trust_env=False)
    jsonschema.validate(
        refused.json(), paths["/explain"]["post"]["responses"]["401"]["content"]["application/json"]["schema"]
    )
    jsonschema.validate(
        httpx.get(f"{served.url}/health", trust_env=False).json(),
        {
            **paths["/health"]["get"]["responses"]["200"]["content"]["application/json"]["schema"],
            "components": described["components"],
        },
    )


def test_a_users_own_socket_needs_no_token(served, tmp_path):
    path = tmp_path / "http"
    served.http.open_socket(path)
    assert path.stat().st_mode & 0o777 == 0o600
    with httpx.Client(transport=httpx.HTTPTransport(uds=str(path))) as client:
        assert client.post("http://kvtier/clear", json={}).json() == {"chunks": 0}


@pytest.mark.parametrize("host", ["elsewhere.example", "elsewhere.example:8100", "[", "127.0.0.1.example", "1.2.3.4"])
def test_a_page_of_another_site_learns_nothing(served, host):
    for path in ("/status", "/health", "/"):
        assert httpx.get(served.url + path, trust_env=False, headers={"Host": host}).status_code == 403


@pytest.mark.parametrize("host", ["localhost", "localhost:8100", "127.0.0.1:1", "[::1]:8100", "[::1]"])
def test_this_machine_has_several_names(served, host):
    assert httpx.get(f"{served.url}/health", trust_env=False, headers={"Host": host}).status_code == 200


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
    told = asked(served, "/status").text + asked(served, "/metrics").text
    path = keys_of(next(iter(served.server.spaces)).namespace, PROMPT)
    assert not any(key.hex() in told for key in [*path, *OWN]) and os.environ[TOKEN] not in told
