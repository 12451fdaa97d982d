"""The README shows what there is."""

import os
import re
from pathlib import Path

import pytest
from test_size import DATA_PLANE, weight

from kvtier_core.config.load import load_config
from kvtier_core.config.registry import Registry

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def blocks(page, language):
    return re.findall(rf"```{language}\n(.*?)```", page, re.DOTALL)


def test_the_readme_is_short():
    assert len(README.splitlines()) < 120


def test_the_data_plane_is_as_small_as_it_says():
    (said,) = re.findall(r"The core data path is less than ([\d,]+) lines of Python", README)
    assert said == f"{weight(*DATA_PLANE) // 500 * 500 + 500:,}"


def test_the_plugin_is_the_example():
    example = ROOT / "plugins/kvtier_testing/examples/backend"
    plugin, laws = blocks((ROOT / "docs/plugins.md").read_text(), "python")[:2]
    assert plugin == (example / "kvtier_example_backend/plugin.py").read_text()
    assert (example / "tests/test_example_backend_laws.py").read_text().endswith(laws)


def test_the_yaml_is_a_stack(tmp_path):
    (yaml,) = blocks(README, "yaml")
    (tmp_path / "kvtier.yaml").write_text(yaml)
    config = load_config(tmp_path / "kvtier.yaml", Registry.discover())
    assert [tier.name for tier in config.tiers] == ["cpu", "disk"]


@pytest.mark.parametrize("file", sorted((ROOT / "examples/stacks").glob("*.yaml")), ids=lambda file: file.name)
def test_an_example_is_a_stack_and_is_listed(file):
    load_config(file, Registry.discover())
    assert f"({file.name})" in file.with_name("README.md").read_text()


def test_the_table_is_what_the_demo_prints():
    """All but the times. `make demo` keeps what it printed."""
    printed = ROOT / "build/demo.txt"
    if not printed.exists() and "KVTIER_CI" not in os.environ:
        pytest.skip("no demo has run here: make demo")
    shown = README.partition("  first word after ")[2].partition("\n\n")[0].splitlines()[1:]
    assert len(shown) == 5
    words = [re.sub(r"\d+\.\d+ s", "", line).split() for line in printed.read_text().splitlines()]
    assert [line for line in shown if re.sub(r"\d+\.\d+ s", "", line).split() not in words] == []
