"""What is written of a tier in a file is what its Config has, and what cannot be is refused where it is written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import attrs
import pytest

from kvtier_core.config.load import load_config
from kvtier_core.config.model import StoreTierConfig
from kvtier_core.config.registry import Registry
from kvtier_core.errors import ConfigError

#: A password in examples that are refused. No message repeats it.
SECRET = "s3cret"


class TierSettings:
    """Laws of the settings of a tier. Subclass it."""

    type: ClassVar[str]
    #: Settings as YAML, and the fields that a Config then has. Together they name every field.
    accepted: ClassVar[Sequence[tuple[str, Mapping[str, Any]]]]
    #: Settings as YAML, the key of the one that is refused, and the beginning of the reason.
    refused: ClassVar[Sequence[tuple[str, str, str]]]

    def load(self, folder: Path, written: str) -> StoreTierConfig:
        file = folder / "kvtier.yaml"
        file.write_text(
            f"version: 1\ntiers:\n  - {{type: heap, capacity: 64MiB}}\n  - {{type: {self.type}, {written}}}\n"
        )
        return load_config(file, Registry.discover()).stores[0]

    def test_what_is_written_is_read(self, tmp_path):
        for written, fields in self.accepted:
            config = self.load(tmp_path, written).config
            assert {name: getattr(config, name) for name in fields} == fields, written

    def test_every_setting_is_among_them(self, tmp_path):
        config = self.load(tmp_path, self.accepted[0][0]).config
        assert {name for _, fields in self.accepted for name in fields} == {
            each.name for each in attrs.fields(type(config))
        }

    def test_what_cannot_be_is_refused_where_it_is_written(self, tmp_path):
        for written, key, why in self.refused:
            with pytest.raises(ConfigError) as refused:
                self.load(tmp_path, written)
            (problem,) = refused.value.problems
            assert problem.path == f"$.tiers[1].{key}", written
            assert problem.why.startswith(why), f"{written}: {problem.why}"
            assert SECRET not in str(refused.value)
