"""`kvtier check`, run as users run it."""

from __future__ import annotations

import json

import pytest

from kvtier_core.cli import main


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_check_shows_every_setting_and_its_origin(folder, capsys):
    (folder / "kvtier.yaml").write_text("version: 1\nload_wait: 500ms\ntiers:\n  - {type: heap, capacity: 1GiB}\n")
    assert main(["check", "kvtier.yaml", "--all"]) == 0
    told = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert told == [
        ["$.tiers[0].type", "heap", "kvtier.yaml:4"],
        ["$.tiers[0].capacity", "1GiB", "kvtier.yaml:4"],
        ["$.tiers[0].eviction", "gittins", "default"],
        ["$.tiers[0].eviction.classes", "full", "default"],
        ["$.tiers[0].store_after", "1", "default"],
        ["$.tiers[0].packing", "off", "default"],
        ["$.tiers[0].keep", "~", "default"],
        ["$.chunk_tokens", "auto", "default"],
        ["$.token_database", "chained", "default"],
        ["$.load_wait", "0.5s", "kvtier.yaml:2"],
        ["$.load", "auto", "default"],
        ["$.save_decode", "false", "default"],
        ["$.requests.store", "all", "default"],
        ["$.requests.load", "all", "default"],
        ["$.requests.salts", "[]", "default"],
        ["$.audit_every", "1000", "default"],
        ["$.identity.weights", "full", "default"],
        ["$.identity.ranks", "own", "default"],
        ["$.on_reset", "forget", "default"],
        ["$.status", "auto", "default"],
        ["$.log_requests", "all", "default"],
        ["$.server", "~", "default"],
    ]


def test_check_shows_what_was_written_and_what_follows_from_it(folder, capsys):
    (folder / "kvtier.yaml").write_text(
        "version: 1\ntiers:\n  - {type: gds, capacity: 1GiB, paths: [store], mode: gds}\nload_wait: 500ms\n"
    )
    assert main(["check", "kvtier.yaml"]) == 0
    told = capsys.readouterr()
    assert [line.split()[0] for line in told.out.splitlines()] == [
        *("$.tiers[0].staging.type", "$.tiers[0].staging.capacity"),
        *("$.tiers[0].type", "$.tiers[0].paths", "$.tiers[0].mode", "$.tiers[0].capacity", "$.load_wait"),
    ]
    assert told.err == "kvtier.yaml: no problems; --all also shows defaults; --open also opens its tiers\n"


DISK = "{type: disk, capacity: 1GiB, path: store"
UNFIT = {
    "no memory": (
        "",
        "1024TiB",
        "kvtier.yaml:3: $.tiers[0]: memory tiers need 1PiB, but this machine has …; lower the capacity",
    ),
    "a folder that is a file": (
        "{type: disk, capacity: 1GiB, path: kvtier.yaml/store}",
        "1MiB",
        "kvtier.yaml:4: $.tiers[1]: … is not a folder; name one",
    ),
    "two tiers with one folder": (
        f"{DISK}}}\n  - {DISK.replace('store', './store')}, shared: true}}",
        "1MiB",
        "kvtier.yaml:5: $.tiers[2]: store is also the folder of $.tiers[1]; give each its own path",
    ),
    "a variable that is not set": (
        f"{DISK}, seal_key: env:KVTIER_NOT_SET}}",
        "1MiB",
        "kvtier.yaml:4: $.tiers[1].seal_key: the environment variable KVTIER_NOT_SET is not set; set it for the engine",
    ),
}


@pytest.mark.parametrize("below, capacity, told", UNFIT.values(), ids=UNFIT)
def test_check_finds_what_keeps_an_engine_from_starting_here(folder, capsys, below, capacity, told):
    first = f"version: 1\ntiers:\n  - {{type: heap, capacity: {capacity}}}\n"
    (folder / "kvtier.yaml").write_text(first + (f"  - {below}\n" if below else ""))
    before = tree(folder)
    assert main(["check", "kvtier.yaml"]) == 1
    said = capsys.readouterr().err
    assert all(part in said for part in told.split("…"))
    assert main(["check", "kvtier.yaml", "--elsewhere"]) == 0
    assert tree(folder) == before


def test_check_tells_what_an_engine_would_start_without(folder, capsys):
    tiers = f"  - {{type: heap, capacity: 1MiB}}\n  - {DISK}, seal_key: env:KVTIER_NOT_SET, required: false}}\n"
    (folder / "kvtier.yaml").write_text(f"version: 1\ntiers:\n{tiers}")
    assert main(["check", "kvtier.yaml"]) == 0
    assert "KVTIER_NOT_SET is not set; set it for the engine; an engine starts without it" in capsys.readouterr().err


def test_a_file_that_cannot_be_read_is_no_problem_of_the_file(folder, capsys):
    assert main(["check", "missing.yaml"]) == 2
    assert capsys.readouterr().err == "missing.yaml: $: cannot be read: No such file or directory\n"


def test_check_tells_every_problem(folder, capsys):
    (folder / "kvtier.yaml").write_text("version: 1\nchunks: 3\ntiers: []\n")
    assert main(["check", "kvtier.yaml"]) == 1
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.splitlines() == [
        "kvtier.yaml:2: $.chunks: unknown key 'chunks'; did you mean 'chunk_tokens'?",
        "kvtier.yaml:3: $.tiers: a stack needs at least one tier",
    ]


def test_problems_for_programs(folder, capsys):
    (folder / "kvtier.yaml").write_text("version: 1\nchunks: 3\ntiers:\n  - {type: heap, capacity: 1MiB}\n")
    assert main(["check", "kvtier.yaml", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["problems"] == [
        {
            "where": "kvtier.yaml:2",
            "path": "$.chunks",
            "why": "unknown key 'chunks'",
            "hint": "did you mean 'chunk_tokens'?",
        }
    ]


def tree(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("there", [False, True])
def test_check_opens_what_an_engine_would_and_leaves_nothing(folder, capsys, shared, there):
    disk = f"{{type: disk, capacity: 1GiB, path: deep/store, shared: {str(shared).lower()}, direct: off}}"
    (folder / "kvtier.yaml").write_text(f"version: 1\ntiers:\n  - {{type: heap, capacity: 64MiB}}\n  - {disk}\n")
    if there or shared:  # what makes a folder a shared one stays in it
        (folder / "deep/store").mkdir(parents=True, mode=0o700)
        assert main(["check", "kvtier.yaml", "--open"]) == 0
        capsys.readouterr()
    before = tree(folder)
    assert main(["check", "kvtier.yaml", "--open", "--json"]) == 0
    opened = json.loads(capsys.readouterr().out)["opened"]
    assert opened["disk"]["direct"] == "off -> off"
    assert tree(folder) == before


def test_check_tells_what_cannot_be_opened(folder, capsys):
    (folder / "file").write_text("")
    disk = "{type: disk, capacity: 1GiB, path: file}"
    (folder / "kvtier.yaml").write_text(f"version: 1\ntiers:\n  - {{type: heap, capacity: 64MiB}}\n  - {disk}\n")
    assert main(["check", "kvtier.yaml", "--open", "--elsewhere"]) == 1
    assert capsys.readouterr().err.splitlines() == [
        "assuming 128KiB of KV per token, as in Llama 3.1 8B; pass --model FOLDER for another model",
        "kvtier.yaml:4: $.tiers[1]: file is not a folder; name one",
    ]


def test_check_says_which_tier_an_engine_would_start_without(folder, capsys):
    (folder / "file").write_text("")
    disk = "{type: disk, capacity: 1GiB, path: file, required: false}"
    (folder / "kvtier.yaml").write_text(f"version: 1\ntiers:\n  - {{type: heap, capacity: 64MiB}}\n  - {disk}\n")
    problem = "disk: not opened, and not required: kvtier.yaml:4: $.tiers[1]: file is not a folder; name one"
    assert main(["check", "kvtier.yaml", "--open"]) == 0
    assert f"{problem}; an engine starts anyway" in capsys.readouterr().err.splitlines()
    assert main(["check", "kvtier.yaml", "--open", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["without"], list(told["opened"])) == ([problem], ["heap"])


def test_check_shows_no_eviction_policy_of_a_shared_store(folder, capsys):
    disk = "{type: disk, capacity: 1GiB, path: store, shared: true}"
    (folder / "kvtier.yaml").write_text(f"version: 1\ntiers:\n  - {{type: heap, capacity: 64MiB}}\n  - {disk}\n")
    assert main(["check", "kvtier.yaml", "--json"]) == 0
    shown = [setting["path"] for setting in json.loads(capsys.readouterr().out)["settings"]]
    assert [path for path in shown if "eviction" in path] == ["$.tiers[0].eviction", "$.tiers[0].eviction.classes"]


def test_check_says_what_of_a_model_fits(folder, capsys):
    (folder / "model").mkdir()
    model = {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096}
    (folder / "model/config.json").write_text(json.dumps({**model, "torch_dtype": "bfloat16"}))
    disk = "{type: disk, capacity: 4PiB, path: store}"
    (folder / "kvtier.yaml").write_text(f"version: 1\ntiers:\n  - {{type: heap, capacity: 64MiB}}\n  - {disk}\n")
    assert main(["check", "kvtier.yaml", "--model", "model", "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert (told["token_nbytes"], told["chunk_tokens"], told["tokens"]["heap"]) == (128 << 10, 16, 512)
    assert [each["what"] for each in told["needs"]] == ["memory", "disk in store"]
    assert len(told["lacking"]) == 1 and told["lacking"][0].startswith("disk in store needs 4PiB, but ")
    assert main(["check", "kvtier.yaml", "--model", "store"]) == 2
    assert "cannot read store/config.json: " in capsys.readouterr().err
