"""Opens the keyed seal that a tier's ``seal_key`` and ``encrypt`` ask for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtier_core.config.model import StoreTierConfig
from kvtier_core.errors import BackendError

if TYPE_CHECKING:
    from kvtier_core.frames.keyed_seal import KeyedSeal


def open_keyed_seal(tier: StoreTierConfig) -> KeyedSeal | None:
    """The keyed seal of a tier's frames; None without a ``seal_key``.

    Raises BackendError if the secret is not there, or too short, or if there is no library for it.
    """
    if tier.seal_key is None:
        return None
    try:
        from kvtier_core.frames.keyed_seal import KeyedSeal  # only here: no other tier needs its library
    except ImportError as error:
        raise BackendError(f"{error}; pip install 'kvtier[seal]'") from error
    try:
        return KeyedSeal.of(tier.seal_key.value, encrypt=tier.encrypt)
    except ValueError as error:
        raise BackendError(f"the secret in {tier.seal_key.variable} cannot be used: {error}") from None
