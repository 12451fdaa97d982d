"""Prompts that an engine brings into memory, or keeps there, as it is told over its status socket."""

from __future__ import annotations

import json
import socket
import threading
from collections import Counter

import pytest
from fake_host import CHUNK, prompt
from patience import HANG
from test_status_page import asked_of, while_it_steps

from kvtier_core.cli import main
from kvtier_core.engine.request_view import KVIdentity
from kvtier_core.engine.scheduler import side
from kvtier_core.engine.scheduler.steering import Steering
from kvtier_doctor import engines
from kvtier_doctor.steering import EngineSteering

PROMPT = prompt(1, 4 * CHUNK + 3)
LONG = prompt(2, 6 * CHUNK + 3)


def told(served, path, **question):
    """The answer to a question that the owner answers in its steps."""
    answers = []
    asking = threading.Thread(target=lambda: answers.append(json.loads(asked_of(path, line_of(question)))))
    asking.start()
    while asking.is_alive():
        served.step()
    asking.join()
    return answers[0]


def line_of(question):
    return json.dumps(question).encode() + b"\n"


def flood(served, prompts=20):
    """Requests that leave nothing in memory that is not pinned."""
    for number in range(prompts):
        served.ask(f"flood {number}", prompt(100 + number, 4 * CHUNK + 3))


def sources(served, tokens, **more):
    """The tiers that a request for this prompt is loaded from, and the tokens of each."""
    served.ask("asked", tokens, **more)
    return served.side.status.recent(1)[0]["tiers"]


def pinned(served):
    return Counter(served.manager.pins_by_holder())


def test_a_prompt_is_found_under_its_salt_alone(host, path):
    served = host()
    served.ask("first", PROMPT, identity=KVIdentity.of("ours"))
    for salt in ("ours", "theirs", ""):
        chunks = told(served, path, prompt=PROMPT, cache_salt=salt)["chunks"]
        assert [chunk["tiers"][:1] for chunk in chunks] == 4 * [["heap"] if salt == "ours" else []]


def test_a_pinned_prompt_stays_in_memory_until_it_is_unpinned(host, path):
    served = host()
    served.ask("first", PROMPT)
    assert told(served, path, pin="system", prompt=PROMPT) == {
        "chunks": 4, "pending": 0, "left_out": 0, "seconds": 86400,
    }  # fmt: skip
    flood(served)
    assert sources(served, PROMPT) == {"heap": 4 * CHUNK}
    assert told(served, path, unpin="system") == {"chunks": 4}
    flood(served)
    assert sources(served, PROMPT) == {"disk": 4 * CHUNK}
    assert told(served, path, pins=True) == {"pins": []}
    served.assert_at_rest()


def test_what_a_pin_keeps_of_a_prompt_on_disk_comes_into_memory(host, path):
    served = host()
    served.ask("first", PROMPT)
    flood(served)
    kept = told(served, path, pin="system", prompt=PROMPT, seconds=60)
    assert kept == {"chunks": 0, "pending": 4, "left_out": 0, "seconds": 60}
    served.settle(), served.step()
    (pin,) = told(served, path, pins=True)["pins"]
    assert (pin["name"], pin["chunks"], pin["slots"], pin["pending"]) == ("system", 4, 4, False)
    flood(served)
    assert sources(served, PROMPT) == {"heap": 4 * CHUNK}


def test_a_prefetched_prompt_is_loaded_from_memory(host, path):
    served = host()
    served.ask("first", PROMPT)
    flood(served)
    assert told(served, path, prefetch=PROMPT) == {"chunks": 4, "in_memory": 0, "asked": []}
    served.settle(), served.step()
    assert told(served, path, prefetch=PROMPT) == {"chunks": 0, "in_memory": 4, "asked": []}
    where = told(served, path, prompt=PROMPT)["chunks"]
    assert [chunk["tiers"] for chunk in where] == 4 * [["heap", "disk"]]


def test_the_pins_of_a_tenant_take_an_eighth_of_the_memory_and_all_pins_a_quarter(host, path):
    """Of 32 chunks; requests without a salt are a tenant."""
    served = host()
    for salt in ("", "a", "b"):
        served.ask(f"of {salt}", LONG, identity=KVIdentity.of(salt))
    assert told(served, path, pin="first", prompt=LONG[: 3 * CHUNK])["chunks"] == 3
    second = told(served, path, pin="second", prompt=LONG)
    assert (second["chunks"], second["left_out"]) == (1, 5)
    third = told(served, path, pin="third", prompt=LONG, cache_salt="a")
    assert (third["chunks"], third["left_out"]) == (4, 2)
    assert told(served, path, pin="fourth", prompt=LONG, cache_salt="b")["left_out"] == 6
    assert pinned(served).total() == 8
    told(served, path, unpin="third")
    assert told(served, path, pin="fourth", prompt=LONG, cache_salt="b")["chunks"] == 4


def test_what_is_on_its_way_for_a_pin_counts_too(host):
    """No step is between the two."""
    served = host()
    served.ask("first", LONG), flood(served)
    steering = EngineSteering(served.manager, CHUNK, served.side._steering.name, lambda: 0.0)
    kept = [steering.answer({"pin": name, "prompt": LONG}) for name in ("one", "other")]
    assert [(each["chunks"], each["pending"], each["left_out"]) for each in kept] == [(0, 4, 2), (0, 0, 6)]
    steering.end()


def test_a_pin_expires_in_a_step_after_its_time(host, path, caplog):
    caplog.set_level("INFO", "kvtier")
    now = [1000.0]
    served = host(clock=lambda: now[0])
    served.ask("first", PROMPT)
    told(served, path, pin="short", prompt=PROMPT, seconds=60)
    now[0] += 59
    served.step()
    assert told(served, path, pins=True)["pins"][0]["seconds"] == 1
    now[0] += 1
    served.step()
    assert not pinned(served)
    assert "kvtier: the pin 'short' has expired; it kept 4 slots" in caplog.messages


def test_a_new_pin_of_a_name_ends_the_old_one(host, path):
    served = host()
    served.ask("first", PROMPT), served.ask("second", LONG)
    told(served, path, pin="system", prompt=PROMPT)
    assert told(served, path, pin="system", prompt=LONG[: 3 * CHUNK])["chunks"] == 3
    (pin,) = told(served, path, pins=True)["pins"]
    assert pin["chunks"] == 3 and pinned(served) == {"0/pin system": 3}


def test_pins_end_when_the_weights_change_and_when_the_engine_closes(host, path, caplog):
    served = host()
    served.ask("first", PROMPT)
    told(served, path, pin="system", prompt=PROMPT)
    served.side.invalidate_all()
    assert told(served, path, pins=True) == {"pins": []} and not pinned(served)
    served.ask("again", PROMPT)
    assert told(served, path, pin="system", prompt=PROMPT)["chunks"] == 4
    served.close()
    assert "still holds" not in caplog.text


def test_the_log_has_a_line_for_each_change_without_tokens_and_salts(host, path, caplog):
    caplog.set_level("INFO", "kvtier")
    served = host(log_requests="off")
    served.ask("first", PROMPT, identity=KVIdentity.of("a secret"))
    caplog.clear()
    told(served, path, pin="system", prompt=PROMPT, cache_salt="a secret", seconds=60)
    told(served, path, prefetch=PROMPT, cache_salt="a secret")
    told(served, path, unpin="system")
    assert [line for line in caplog.messages if "pin" in line] == [
        "kvtier: the pin 'system' keeps 4 chunks, 0 may follow; it expires in 60 s",
        "kvtier: the pin 'system' was deleted; it kept 4 slots",
    ]
    assert "secret" not in caplog.text and str(PROMPT[:3])[1:-1] not in caplog.text


@pytest.mark.parametrize(
    ("question", "why"),
    [
        ({"pin": "system"}, "expected the fields of one of"),
        ({"pin": "system", "prompt": PROMPT, "second": 60}, "expected the fields of one of"),
        ({"pin": "system", "prompt": PROMPT, "prefetch": PROMPT}, "expected the fields of one of"),
        ({"unpin": "system", "prompt": PROMPT}, "expected the fields of one of"),
        ({"pin": "system", "prompt": [1, True]}, "expected token ids"),
        ({"prefetch": "1 2 3"}, "expected token ids"),
        ({"pin": "", "prompt": PROMPT}, "expected a name"),
        ({"pin": 7, "prompt": PROMPT}, "expected a name"),
        ({"pin": "a\nb", "prompt": PROMPT}, "expected a name"),
        ({"pin": "\ud800", "prompt": PROMPT}, "expected a name"),
        ({"unpin": "x" * 129}, "expected a name"),
        ({"pin": "system", "prompt": PROMPT, "cache_salt": None}, "expected a text as cache_salt"),
        *[
            ({"pin": "system", "prompt": PROMPT, "seconds": seconds}, "at most 2592000 seconds")
            for seconds in (0, -1, True, "60", None, 1e9, float("nan"), float("inf"))
        ],
    ],
)
def test_a_call_that_is_refused_changes_nothing_and_waits_for_no_step(host, path, question, why):
    served = host()
    served.ask("first", PROMPT)
    told(served, path, pin="system", prompt=PROMPT)
    before = pinned(served)
    assert why in json.loads(asked_of(path, line_of(question)))["error"]
    served.step()
    assert pinned(served) == before == {"0/pin system": 4}


def test_a_prompt_that_cannot_be_named_changes_nothing(host, path):
    served = host()
    served.ask("first", PROMPT)
    told(served, path, pin="system", prompt=PROMPT)
    for token in (-1, 1 << 40):
        assert "cannot be named" in told(served, path, pin="system", prompt=[*PROMPT[:-4], token, 1, 2, 3])["error"]
    assert pinned(served) == {"0/pin system": 4}


def test_nothing_is_done_for_a_client_that_has_hung_up(host, path):
    served = host()
    served.ask("first", PROMPT)
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))
        client.sendall(line_of({"pin": "system", "prompt": PROMPT}))
    assert json.loads(asked_of(path, b'{"status": true}\n'))["pid"], "the question waits for the owner"
    served.step()
    assert not pinned(served)
    assert told(served, path, pins=True) == {"pins": []}


def test_a_client_that_has_only_ended_its_sending_is_answered(host, path):
    served = host()
    served.ask("first", PROMPT)
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(HANG)
        client.connect(str(path))
        client.sendall(line_of({"pin": "system", "prompt": PROMPT}))
        client.shutdown(socket.SHUT_WR)
        assert json.loads(asked_of(path, b'{"status": true}\n'))["pid"]
        served.step()
        assert json.loads(client.recv(1 << 16))["chunks"] == 4


def test_an_engine_of_a_server_names_the_server(host):
    served = host()
    steering = EngineSteering(object(), CHUNK, served.side._steering.name, lambda: 0.0)
    for question in ({"pins": True}, {"prefetch": PROMPT}, {"unpin": "x"}, {"pin": "x", "prompt": PROMPT}):
        assert not steering.why_not(question)
        assert "kvtier serve pins" in steering.answer(question)["error"]
    steering.step(), steering.end()


def test_without_the_package_a_question_names_it(host, path, monkeypatch):
    monkeypatch.setattr(side, "steering", lambda: Steering)
    served = host()
    assert "pip install 'kvtier[doctor]'" in json.loads(asked_of(path, line_of({"pins": True})))["error"]
    assert served.ask("first", PROMPT) == 0


# -- the commands ----------------------------------------------------------------------------------------


@pytest.fixture
def file(tmp_path):
    (tmp_path / "prompt.json").write_text(json.dumps(PROMPT))
    return str(tmp_path / "prompt.json")


def test_prompts_are_pinned_and_prefetched_from_the_command_line(host, path, file, capsys, monkeypatch):
    served = host()
    served.ask("first", PROMPT, identity=KVIdentity.of("a secret"))
    monkeypatch.setenv("TENANT", "a secret")
    whose = ["--prompt", file, "--cache-salt", "env:TENANT", "--socket", str(path)]
    assert while_it_steps(served, "prefetch", *whose) == 0
    assert capsys.readouterr().out == "0 chunks are on their way, 4 were in memory\n"
    assert while_it_steps(served, "pins", "--add", "a name ü", "--for", "90s", *whose) == 0
    assert capsys.readouterr().out == "a name ü: 4 chunks are kept, 0 may follow\n"
    assert while_it_steps(served, "pins", "--socket", str(path)) == 0
    assert capsys.readouterr().out.splitlines()[1].split() == ["a", "name", "ü", "4", "4", "0.0", "h"]
    assert while_it_steps(served, "pins", "--json", "--socket", str(path)) == 0
    (pin,) = json.loads(capsys.readouterr().out)[str(path)]["pins"]
    assert pin["name"] == "a name ü" and 0 < pin["seconds"] <= 90
    assert while_it_steps(served, "pins", "--delete", "a name ü", "--socket", str(path)) == 0
    assert capsys.readouterr().out == "a name ü: 4 slots are kept no longer\n"
    assert main(["pins", "--add", "x", "--socket", str(path)]) == 2
    assert "--prompt FILE" in capsys.readouterr().err


def test_every_engine_is_told_and_one_that_does_not_answer_is_a_problem(host, tmp_path, file, capsys, monkeypatch):
    """The engine is one; the other socket is what a killed one left."""
    tmp_path.chmod(0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    served = host(status="auto")
    served.ask("first", PROMPT)
    (path,) = engines.found(None)
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path.parent / "status-1-1.sock"))
        assert while_it_steps(served, "pins", "--add", "system", "--prompt", file) == 1
        shown = capsys.readouterr()
        assert shown.out.splitlines() == [str(path), "system: 4 chunks are kept, 0 may follow"]
        assert "status-1-1.sock: no engine answers" in shown.err
    served.side.status.close()
    assert main(["pins"]) == 2
