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
