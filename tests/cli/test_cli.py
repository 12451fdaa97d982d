"""The command line, run as users run it."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys

import pytest

from kvtier_core.cli import main, parser


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def install_broken(folder):
    """A plugin whose module is missing."""
    info = folder / "kvtier_nope-0.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: kvtier-nope\nVersion: 0.1\n")
    (info / "entry_points.txt").write_text("[kvtier.v1]\nnope = kvtier_nope_missing\n")


def test_plugins_lists_what_there_is(folder, capsys):
    assert main(["plugins", "--strict"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == ["kind", "name", "plugin", "version", "api", "state"]
    assert ["eviction", "policy", "lru", "kvtier:builtin"] in [line[:4] for line in lines]


def test_plugins_says_how_to_choose_among_two_of_a_name(folder, capsys):
    info = folder / "kvtier_twin-0.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: kvtier-twin\nVersion: 0.2\n")
    (info / "entry_points.txt").write_text("[kvtier.v1]\ntwin = kvtier_twin\n")
    (folder / "kvtier_twin.py").write_text(
        "from kvtier_core.hookspecs import hookimpl\nfrom kvtier_core.policies.lru import LruConfig as Theirs\n"
        "import attrs\n@attrs.frozen\nclass LRUConfig(Theirs):\n    type = 'lru'\n    aliases = ()\n"
        "@hookimpl\ndef kvtier_eviction_policies():\n    return [LRUConfig]\n"
    )
    assert main(["plugins", "--strict", "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    chosen = {each["choose"]: each["state"] for each in told["plugins"] if each["name"] == "lru"}
    assert chosen == {"lru@kvtier-twin:twin": "shadowed", "lru@kvtier:builtin": "shadowed"}
    assert told["clashes"] == [
        "eviction policy 'lru' is offered by kvtier-twin:twin and by kvtier:builtin; "
        "write 'lru@kvtier-twin:twin' or 'lru@kvtier:builtin'"
    ]


def test_plugins_says_which_library_is_missing(folder, capsys):
    info = folder / "kvtier_poor-0.2.dist-info"
    info.mkdir()
    requires = "Requires-Dist: kvtier\nRequires-Dist: no-such-library>=2\nRequires-Dist: none-either; extra == 'x'\n"
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: kvtier-poor\nVersion: 0.2\n{requires}")
    (info / "entry_points.txt").write_text("[kvtier.v1]\npoor = kvtier_poor\n")
    (folder / "kvtier_poor.py").write_text(
        "from kvtier_core.hookspecs import hookimpl\nfrom kvtier_core.policies.lru import LruConfig as Theirs\n"
        "import attrs\n@attrs.frozen\nclass PoorConfig(Theirs):\n    type = 'poor'\n    aliases = ()\n"
        "@hookimpl\ndef kvtier_eviction_policies(): return [PoorConfig]\n"
    )
    assert main(["plugins"]) == 0
    told = capsys.readouterr().out.splitlines()
    assert next(line.split()[-1] for line in told if "kvtier-poor:poor" in line) == "lacking"
    assert "lacking: eviction policy poor needs no-such-library; pip install no-such-library" in told


def test_plugins_shows_where_a_broken_one_failed(folder, capsys):
    install_broken(folder)
    assert main(["plugins", "--traceback"]) == 0
    told = capsys.readouterr().out.splitlines()
    assert told[-1] == "ModuleNotFoundError: No module named 'kvtier_nope_missing'"
    assert "Traceback (most recent call last):" in told
    assert next(line.split()[-1] for line in told if "kvtier-nope:nope" in line) == "broken"


def test_a_plugin_that_prints_leaves_json_alone(folder, capsys):
    install_broken(folder)
    (folder / "kvtier_nope-0.1.dist-info/entry_points.txt").write_text("[kvtier.v1]\nnope = kvtier_loud\n")
    (folder / "kvtier_loud.py").write_text("print('hello')")
    assert main(["plugins", "--json"]) == 0
    said = capsys.readouterr()
    assert "kvtier-nope:nope" in str(json.loads(said.out)) and said.err == "hello\n"


def test_plugins_tells_what_is_broken(folder, capsys):
    install_broken(folder)
    assert main(["plugins"]) == 0
    assert main(["plugins", "--strict"]) == 1
    told = capsys.readouterr().out.splitlines()
    assert told.count("broken: kvtier-nope:nope 0.1: ModuleNotFoundError: No module named 'kvtier_nope_missing'") == 2


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
        ["$.identity.weights", "full", "default"],
        ["$.identity.ranks", "own", "default"],
        ["$.on_reset", "forget", "default"],
        ["$.record", "~", "default"],
        ["$.status", "auto", "default"],
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


def test_every_command_speaks_json():
    (commands,) = (each.choices for each in parser()._actions if each.choices)
    assert len(commands) >= 8
    assert [name for name, each in commands.items() if "--json" not in each.format_help()] == []


def on_a_terminal(*arguments, **environment):
    """What the command writes to a terminal."""
    ours, theirs = pty.openpty()
    start = "import sys; from kvtier_core.cli import main; sys.exit(main())"
    variables = {**os.environ, "TERM": "xterm", **environment}
    with open(ours, "rb") as shown:
        subprocess.run([sys.executable, "-c", start, *arguments], stdout=theirs, env=variables, check=True)
        os.close(theirs)
        return b"".join(iter(lambda: _rest(shown), b""))


def _rest(shown):
    try:
        return shown.read1()
    except OSError:  # the other end is closed
        return b""


def test_colours_are_for_terminals_alone(capsys):
    assert b"\33[" in on_a_terminal("plugins", NO_COLOR="")
    assert b"\33[" not in on_a_terminal("plugins", NO_COLOR="1")
    assert main(["plugins"]) == 0
    assert "\33[" not in capsys.readouterr().out


@pytest.mark.parametrize(
    "words, expected",
    [
        (["kvtier", "fs"], ["fsck"]),
        (["kvtier", "fsck", "--re"], ["--repair", "--remove-incompatible"]),
        (["kvtier", "completion", "z"], ["zsh"]),
        (["kvtier", "check", "some-fi"], []),
    ],
)
def test_bash_completes(capsys, words, expected):
    assert main(["completion", "bash"]) == 0
    script = capsys.readouterr().out
    typed = f"COMP_WORDS=({' '.join(words)}); COMP_CWORD={len(words) - 1}; _kvtier; echo ${{COMPREPLY[@]}}"
    told = subprocess.run(["bash", "-c", f"{script}\n{typed}"], capture_output=True, text=True, check=True)
    assert sorted(told.stdout.split()) == sorted(expected)


def test_a_reader_that_has_seen_enough_is_no_error(folder):
    start = "import sys; from kvtier_core.cli import main; sys.exit(main())"
    command = f"{sys.executable} -c '{start}' schema | head -n 1"
    told = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    assert (told.stdout, told.stderr) == ("{\n", "")


def test_a_command_is_needed(capsys):
    with pytest.raises(SystemExit) as left:
        main([])
    assert left.value.code == 2
    assert capsys.readouterr().err.splitlines()[-1] == "kvtier: error: the following arguments are required: COMMAND"
