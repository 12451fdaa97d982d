"""What tests need and not every machine has."""

import os

import pytest


def needs(what: str, there: object, way: str = "make programs") -> None:
    """Skip the test if something that it needs is not there; where nothing may be skipped, fail."""
    if there:
        return
    sentence = f"{what} is not installed: {way}"
    if os.environ.get("KVTIER_CI"):
        pytest.fail(sentence)
    pytest.skip(sentence)
