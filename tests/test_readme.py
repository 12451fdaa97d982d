"""What the README shows is what there is."""

import re
from pathlib import Path

from kvtier_core.config.load import load_config
from kvtier_core.config.registry import Registry

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def test_the_plugin_is_the_example():
    example = ROOT / "examples/plugins/backend"
    plugin, laws = blocks("python")
    assert plugin == (example / "kvtier_example_backend/plugin.py").read_text()
    assert (example / "tests/test_example_backend_laws.py").read_text().endswith(laws)


def test_the_yaml_is_a_stack(tmp_path):
    (yaml,) = blocks("yaml")
    (tmp_path / "kvtier.yaml").write_text(yaml)
    config = load_config(tmp_path / "kvtier.yaml", Registry.discover())
    assert [tier.name for tier in config.tiers] == ["cpu", "disk"]
