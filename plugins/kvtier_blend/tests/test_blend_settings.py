"""The settings of blending, in vLLM's ``kv_connector_extra_config``."""

from __future__ import annotations

import pytest

from kvtier_blend.settings import SETTINGS, BlendSettings, read_settings
from kvtier_core.errors import ConfigError


def test_the_defaults():
    settings = read_settings({SETTINGS: {"accept_quality": "unmeasured"}})
    assert settings == BlendSettings(accept_quality="unmeasured", tail=0.25, link=4, min_tokens=512)


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ({}, "accept_quality"),
        ({"accept_quality": "fine"}, "accept_quality"),
        ({"accept_quality": "unmeasured", "tail": 1}, "expected a share of the prompt from 0 to below 1, got 1"),
        ({"accept_quality": "unmeasured", "link": -1}, "expected 0 or more tokens, got -1"),
        ({"accept_quality": "unmeasured", "tale": 0.5}, "unknown key 'tale'"),
    ],
    ids=repr,
)
def test_what_is_wrong_is_said_with_its_place(said, why):
    with pytest.raises(ConfigError, match=why) as refused:
        read_settings({SETTINGS: said})
    assert "$.kvtier.blend" in str(refused.value)
