"""The JSON Schema of the configuration file accepts what `load` accepts, and refuses what is broken."""

from __future__ import annotations

import re

import jsonschema
import pytest
import yaml
from source_copy import ROOT

from kvtier_core.config.load import load_config
from kvtier_core.config.registry import Registry
from kvtier_core.errors import ConfigError
from kvtier_doctor.schema import schema_of

REGISTRY = Registry.discover()
SCHEMA = schema_of(REGISTRY)
VALID = jsonschema.Draft7Validator(SCHEMA)
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md")), *sorted(ROOT.glob("plugins/*/README.md"))]
BLOCKS = [
    pytest.param(block, id=f"{page.relative_to(ROOT)}-{number}")
    for page in PAGES
    for number, block in enumerate(re.findall(r"```yaml\n(.*?)```", page.read_text(), re.DOTALL))
    if not block.startswith("spec:") and "servers:" not in block  # of a pod, and of a fleet
]
TIERS = "version: 1\ntiers:\n  - {type: cpu, capacity: 1GiB}\n"
BROKEN = {
    "no tiers": "version: 1\n",
    "another version": TIERS.replace("1\n", "2\n", 1),
    "a typo": TIERS + "chunk_token: 64\n",
    "a size without a unit": TIERS.replace("1GiB", "1000"),
    "a time without a unit": TIERS + "load_wait: 2\n",
    "a store tier first": "version: 1\ntiers:\n  - {type: disk, capacity: 1GiB, path: /x}\n",
    "no such tier": TIERS.replace("cpu", "tape"),
    "a disk without a path": TIERS + "  - {type: disk, capacity: 1GiB}\n",
    "a disk without a capacity": TIERS + "  - {type: disk, path: /x}\n",
    "no such policy": TIERS.replace("1GiB", "1GiB, eviction: lastest"),
    "another plugin's setting": TIERS.replace("1GiB", "1GiB, eviction: {type: lru, classes: full}"),
    "a word that is no choice": TIERS + "load: sometimes\n",
    "too few threads": TIERS + "  - {type: disk, capacity: 1GiB, path: /x, threads: 0}\n",
    "a secret in the file": TIERS + "  - {type: disk, capacity: 1GiB, path: /x, seal_key: hunter2}\n",
}
FINE = {
    "a shared disk": TIERS + "  - {type: disk, path: /x, shared: true}\n",
    "a full name": TIERS.replace("cpu", "cpu@kvtier-cpu:cpu"),
    "an alias, with settings": TIERS.replace("1GiB", "1GiB, eviction: {type: git, classes: simple}"),
    "words that YAML takes for others": TIERS.replace("1GiB", "1GiB, huge_pages: off") + "save_decode: on\n",
    "nothing": TIERS.replace("1GiB", "1GiB, keep: ~"),
    "a recording": TIERS + "observers: [{type: recording, path: /x}]\n",
    "a server": "version: 1\nserver: unix:/run/kvtier/kvtier.sock\n",
    "spaces in a size": TIERS.replace("1GiB", "1 GiB"),
}


def whole(block: str) -> str:
    """Blocks of documents that show a few settings are completed to a file."""
    if "tiers:" in block or "server:" in block:
        return block if "version:" in block else f"version: 1\n{block}"
    return TIERS + block


def test_the_schema_is_valid():
    jsonschema.Draft7Validator.check_schema(SCHEMA)
    assert BLOCKS


@pytest.mark.parametrize("block", BLOCKS)
def test_the_schema_accepts_what_the_documents_show(block, tmp_path):
    text = whole(block)
    (tmp_path / "kvtier.yaml").write_text(text)
    load_config(tmp_path / "kvtier.yaml", REGISTRY)
    VALID.validate(yaml.safe_load(text))


@pytest.mark.parametrize("text", FINE.values(), ids=FINE)
def test_the_schema_accepts_valid_stacks(text, tmp_path):
    (tmp_path / "kvtier.yaml").write_text(text)
    load_config(tmp_path / "kvtier.yaml", REGISTRY)
    VALID.validate(yaml.safe_load(text))


@pytest.mark.parametrize("text", BROKEN.values(), ids=BROKEN)
def test_the_schema_refuses_broken_stacks(text, tmp_path):
    (tmp_path / "kvtier.yaml").write_text(text)
    with pytest.raises(ConfigError):
        load_config(tmp_path / "kvtier.yaml", REGISTRY)
    assert not VALID.is_valid(yaml.safe_load(text))


def test_settings_are_explained():
    """By the comments beside them in the code."""
    disk = next(
        tier for tier in SCHEMA["properties"]["tiers"]["additionalItems"]["anyOf"]
        if "disk" in tier["properties"]["type"]["enum"]
    )  # fmt: skip
    assert disk["properties"]["min_free"]["description"] == "no write leaves less than this free on the file system"
    assert SCHEMA["properties"]["load"]["description"].startswith("``auto`` loads from a store tier if that is faster")
