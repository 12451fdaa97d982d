"""The files in examples/hosts: what the pages show, what `kvtier check` finds in them, and what it says is wrong."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest

from kvtier_core.cli import main
from kvtier_doctor import host_files

ROOT = Path(__file__).parents[3]
VLLM = ROOT / "plugins/kvtier_vllm/kvtier_vllm/offloading.py"
EXAMPLES = ROOT / "examples/hosts"
PAGES = {"vllm.json": "vllm-offloading.md", "lmcache.json": "lmcache-l2.md", "sglang.json": "sglang.md"}


@pytest.fixture(params=PAGES)
def example(request, tmp_path, monkeypatch) -> Path:
    """One of the files, over a file with tiers that a test may open."""
    monkeypatch.chdir(tmp_path)
    stack = (EXAMPLES / "kvtier.yaml").read_text()
    (tmp_path / "kvtier.yaml").write_text(
        stack.replace("1GiB", "64MiB").replace("200GiB", "64MiB").replace("/var/lib/kvtier", str(tmp_path / "kv"))
    )
    file = tmp_path / request.param
    file.write_text((EXAMPLES / file.name).read_text().replace("/etc/kvtier.yaml", "kvtier.yaml"))
    return file


def problems(capsys, file: Path) -> list[str]:
    assert main(["check", file.name]) == 1
    return capsys.readouterr().err.splitlines()


def inline(file: Path, **changes) -> Path:
    """The same host with the stack in its own file."""
    stack = {"version": 1, "tiers": [{"type": "cpu", "capacity": "64MiB"}], **changes}
    file.write_text(file.read_text().replace('"kvtier.yaml"', json.dumps(stack)))
    return file


@pytest.mark.parametrize("name", PAGES)
def test_a_page_shows_its_example(name):
    page = " ".join((ROOT / "docs" / PAGES[name]).read_text().split())
    for file in (EXAMPLES / name, EXAMPLES / "kvtier.yaml"):
        assert " ".join(file.read_text().split()) in page


def test_the_stack_is_found_and_opened(example, capsys):
    assert main(["check", example.name, "--open"]) == 0
    assert "kvtier.yaml:4" in capsys.readouterr().out
    assert main(["doctor", example.name, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [each["tier"] for each in told["tiers"]] == ["cpu", "disk"]


def test_settings_have_their_origin_in_the_file_of_the_host(example, capsys):
    assert main(["check", inline(example, load_wait="3s").name]) == 0
    lines = {words[0]: words[1:] for words in map(str.split, capsys.readouterr().out.splitlines())}
    assert lines["$.load_wait"] == ["3s", f"{example.name}:{lines['$.tiers[0].type'][1].split(':')[1]}"]


def test_errors_in_the_stack_are_reported_at_their_place_in_the_file(example, capsys):
    (told,) = problems(capsys, inline(example, load_wiat="3s"))
    assert told.startswith(f"{example.name}:")
    assert told.endswith("config.load_wiat: unknown key 'load_wiat'; did you mean 'load_wait'?")


def test_a_setting_that_means_nothing_for_a_host_is_refused(example, capsys):
    (told,) = problems(capsys, inline(example, chunk_tokens=16))
    assert told.endswith("$.chunk_tokens: it has no effect where the host moves the pages; remove it")


def test_every_class_for_a_host_is_known():
    ours = {
        node.name: f"{file.parent.name}.{file.stem}"
        for file in (*ROOT.glob("plugins/kvtier_hosts/kvtier_hosts/*.py"), VLLM)
        for node in ast.parse(file.read_text()).body
        if isinstance(node, ast.ClassDef) and node.name.startswith("KVTier")
    }
    assert ours == {name: module for name, (_, module) in host_files._CLASSES.items()}


@pytest.mark.parametrize("key", ["module_path", "config"])
def test_a_key_that_is_missing_is_named(example, capsys, key):
    example.write_text(example.read_text().replace(f'"{key}"', '"other"'))
    (told,) = problems(capsys, example)
    assert f"'{key}'" in told


def test_a_class_that_its_module_has_not_is_refused(example, capsys):
    example.write_text(example.read_text().replace('"KVTier', '"Kvtier'))
    (told,) = problems(capsys, example)
    assert "must be 'KVTier" in told


def test_lmcache_has_to_be_told_its_models(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "lmcache.json"
    file.write_text((EXAMPLES / file.name).read_text().replace('"models"', '"model"'))
    assert problems(capsys, file) == ["lmcache.json:2: $.adapter_params: 'models' is missing"]
