"""What README and documentation show is what there is: commands, code, log lines, settings and links.

Their YAML is loaded by plugins/kvtier_doctor/tests/test_schema.py. Anchors, and which pages the site has, `make docs`
checks.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import runpy
import sqlite3
import subprocess
import sys
import textwrap
import types
import typing

import attrs
import pytest
from source_copy import ROOT

from kvtier_core.cli import parser
from kvtier_core.config.model import ArenaTierConfig, StoreTierConfig
from kvtier_core.config.registry import Registry
from kvtier_core.errors import StoreFull
from kvtier_core.hookspecs import TIER_KEYS
from kvtier_core.interfaces import Observer
from kvtier_core.storekit.shared_space import SharedSpace
from kvtier_core.telemetry.event_log import _LOG_LEVELS
from kvtier_core.types import Event, EventKind
from kvtier_testing.samples import make_context, make_keys

PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md")), *sorted(ROOT.glob("plugins/*/README.md"))]
PAGES += [ROOT / "SECURITY.md", ROOT / "CONTRIBUTING.md", ROOT / "RELEASING.md"]
LANGUAGES = {"yaml", "python", "sh", "json", "text", ""}  #: the last two are no code
#: What a page may tell its readers to run besides kvtier: it builds, installs, serves, asks, or looks.
OTHERS = {"bash", "cd", "curl", "kubectl", "make", "openssl", "pip", "pytest", "python", "source", "sudo", "vllm"}
#: Bash reads the commands and finds none of them: each is written down instead.
RECORD = r"""
command_not_found_handle() { printf '%s\x1f' "$@" >>commands; printf '\x1e' >>commands; }
cd() { command_not_found_handle cd "$@"; }
source() { command_not_found_handle source "$@"; }
"""

WHOLE = parser()
(COMMANDS,) = (each.choices for each in WHOLE._actions if isinstance(each, argparse._SubParsersAction))


def each(found):
    """A case for everything that is found in the text of a page."""
    return [
        pytest.param(page, one, id=f"{page.relative_to(ROOT)}-{number}")
        for page in PAGES
        for number, one in enumerate(found(page.read_text()))
    ]


def fences(text, *languages):
    found = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    return [block for language, block in found if language in languages]


def scripts(text):
    """Blocks of `sh`, and indented ones that begin with a command."""
    indented = re.findall(r"(?:^    .*\n)+", re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE), re.M)
    begins = rf"({'|'.join(OTHERS | {'kvtier'})})\s"
    return fences(text, "sh") + [block for block in map(textwrap.dedent, indented) if re.match(begins, block)]


def commands_in(script, folder):
    ran = subprocess.run(
        ["/bin/bash", "-c", f"{RECORD}\n{script}"], cwd=folder, env={"PATH": "/nowhere"}, capture_output=True, text=True
    )
    assert "syntax error" not in ran.stderr and "unexpected" not in ran.stderr, ran.stderr
    return [command.split("\x1f")[:-1] for command in (folder / "commands").read_text().split("\x1e")[:-1]]


def targets():
    found = re.findall(r"^([\w-]+(?: [\w-]+)*):(?!=)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    return set(" ".join(found).split())


@pytest.mark.parametrize(("page", "script"), each(scripts))
def test_commands_are_those_of_the_real_programs(page, script, tmp_path):
    for name, *arguments in commands_in(script, tmp_path):
        assert name in OTHERS | {"kvtier"}
        if name == "kvtier":
            WHOLE.parse_args(arguments)  # exits if it does not understand
        if name == "make":
            assert arguments[0] in targets()


@pytest.mark.parametrize(("page", "said"), each(lambda text: re.findall(r"`kvtier ([a-z]+(?: [^`]*)?)`", text)))
def test_a_command_in_a_sentence_has_these_options(page, said):
    name, *words = said.split()
    known = {option for action in COMMANDS[name]._actions for option in action.option_strings}
    assert {word for word in words if word.startswith("--")} <= known


@pytest.mark.parametrize(("page", "block"), each(lambda text: fences(text, "python")))
def test_python_runs_and_what_it_offers_opens(page, block, monkeypatch):
    shown = types.ModuleType("shown")
    monkeypatch.setitem(sys.modules, "shown", shown)
    exec(compile(block, page.name, "exec"), vars(shown))
    offered = [offer.config for offer in Registry.of(shown).offers() if offer.config.__module__ == "shown"]
    assert bool(offered) == ("@hookimpl" in block)
    for config in offered:
        with contextlib.closing(config().open(make_context())) as opened:
            if isinstance(opened, Observer):
                opened.observe([Event(EventKind.BREAKER_OPEN, "disk")])
            else:
                assert list(opened.contains(make_keys(2))) == [False, False]


def test_the_ledger_of_the_guide_keeps_two_users_within_a_capacity(tmp_path):
    """Each frame has 10 bytes, and there is room for 10 of them."""
    (block,) = (block for block in fences((ROOT / "docs/plugins.md").read_text(), "python") if "class Ledger" in block)
    shown = {}
    exec(compile(block, "plugins.md", "exec"), shown)
    path = str(tmp_path / "store.sqlite")
    spaces = [SharedSpace(shown["Ledger"](path, 5.0), 100) for _ in range(2)]
    with contextlib.closing(sqlite3.connect(path)) as database:
        for number in range(30):
            spaces[number % 2].take(10)
            with database:
                database.execute("INSERT INTO frames VALUES (?, zeroblob(10), ?)", (bytes([number]), number))
            (total,) = database.execute("SELECT sum(length(frame)) FROM frames").fetchone()
            assert total <= 100
        kept = [key[0] for (key,) in database.execute("SELECT key FROM frames ORDER BY number")]
    assert kept == list(range(30 - len(kept), 30)) and len(kept) > 5, "the oldest make room"
    with pytest.raises(StoreFull):
        spaces[0].take(101)


@pytest.mark.parametrize(("page", "block"), each(lambda text: fences(text, "json")))
def test_blocks_of_json_are_valid(page, block):
    json.loads(block)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_blocks_are_in_a_language_that_is_checked(page):
    opening = re.findall(r"^```(\w*)$", page.read_text(), re.MULTILINE)[::2]
    assert set(opening) <= LANGUAGES


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    links = re.findall(r"\]\((?!\w+:)([^)#\s]+)", page.read_text())
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_the_keys_of_the_core_are_listed():
    page = (ROOT / "docs/plugins.md").read_text()
    names = r"((?:`\w+`[,\n ]*(?:and )?)+)"
    (reserved,) = re.findall(rf"\n\n{names}of\na tier belong to the core", page)
    (later,) = re.findall(rf"The core's\nlater keys are {names}\.", page)
    keys = attrs.fields_dict(ArenaTierConfig).keys() | attrs.fields_dict(StoreTierConfig).keys()
    keys = keys - {"name", "config", "source"} | {"type"}
    assert re.findall(r"`(\w+)`", reserved) == TIER_KEYS.split()
    assert re.findall(r"`(\w+)`", later) == sorted(keys - set(TIER_KEYS.split()))


# -- troubleshooting ---------------------------------------------------------------------------------------

MESSAGES = {
    line.partition(": ")[2].removeprefix("kvtier: ")
    for line in (ROOT / "tests/messages.txt").read_text().splitlines()
    if line.startswith("  ")
}


def test_troubleshooting_is_by_lines_that_are_said():
    rows = re.findall(r"^\| `([^|]+)` \|", (ROOT / "docs/troubleshooting.md").read_text(), re.MULTILINE)
    events = {kind.value for kind in _LOG_LEVELS}
    assert events <= set(rows)
    assert [row for row in rows if row.removeprefix("kvtier: ") not in MESSAGES | events] == []
    assert len(rows) > 30


# -- settings ----------------------------------------------------------------------------------------------

SETTINGS = runpy.run_path(str(ROOT / "docs/building/settings.py"))
OFFERS = Registry.discover().offers()


def test_every_plugin_has_its_settings_on_the_page():
    page = "\n".join(SETTINGS["pages"](Registry.discover()))
    for offer in OFFERS:
        section = page.partition(f"## {offer.kind} `{offer.name}`\n")[2].partition("\n## ")[0]
        fields = [field.alias for field in attrs.fields(offer.config) if field.init]
        assert re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE) == fields


@pytest.mark.parametrize("offer", OFFERS, ids=lambda offer: offer.name)
def test_only_text_is_called_text(offer):
    hints = typing.get_type_hints(offer.config)
    for field in attrs.fields(offer.config):
        if "text" in SETTINGS["written"](hints[field.name]):
            assert "str" in str(hints[field.name])
