"""An engine's file names a server; the package that reaches it is found by its entry point."""

from __future__ import annotations

from importlib.metadata import EntryPoint

import pytest

from kvtier_core.cli import main
from kvtier_core.cli.output import FINE, PROBLEMS
from kvtier_core.config import server_client
from kvtier_core.errors import ConfigError


def installed(monkeypatch, *entries: EntryPoint) -> None:
    monkeypatch.setattr(server_client, "entry_points", lambda group: [each for each in entries if each.group == group])


def test_the_installed_client_has_every_function():
    client = server_client.server_client()
    assert all(callable(getattr(client, each)) for each in ("probe", "open_stack", "served_tier", "served_store"))


@pytest.mark.parametrize(
    ("entries", "told"),
    [
        ([], r"\$\.server: the client of kvtier serve is not installed; pip install 'kvtier\[remote\]'"),
        ([EntryPoint("tcp", "math", "kvtier.servers")], "not installed"),
        ([EntryPoint("unix", "kvtier_gone", "kvtier.servers")], "kvtier_gone cannot be imported: No module named"),
    ],
    ids=["none", "another scheme", "broken"],
)
def test_a_missing_client_is_a_problem_of_the_file(monkeypatch, entries, told):
    installed(monkeypatch, *entries)
    with pytest.raises(ConfigError, match=told):
        server_client.server_client()


def test_a_check_says_what_an_engine_would(monkeypatch, tmp_path, capsys):
    """A server that is down is a warning; an engine without its client does not start."""
    file = tmp_path / "engine.yaml"
    file.write_text(f"version: 1\nserver: unix:{tmp_path}/s\n")
    assert main(["check", "--open", str(file)]) == FINE
    assert "an engine starts anyway" in capsys.readouterr().err
    installed(monkeypatch)
    assert main(["check", str(file)]) == PROBLEMS
    assert "the client of kvtier serve is not installed; pip install 'kvtier[remote]'" in capsys.readouterr().err
