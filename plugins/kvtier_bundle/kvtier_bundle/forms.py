"""How a tier stores the frames of a namespace, and how a bundle does: as a store that engines share."""

from __future__ import annotations

import contextlib
import secrets
from typing import TYPE_CHECKING, Self

import attrs

from kvtier_core.builtin.raw import RawConfig
from kvtier_core.config.model import StoreTierConfig
from kvtier_core.config.open import open_keyed_seal
from kvtier_core.errors import BackendError
from kvtier_core.frames.format import FrameError, Header, expected_header, write_header
from kvtier_core.frames.identity import PACKED, RAW, UNKEYED, CodecIdentity, identity_of
from kvtier_core.interfaces import Backend, OpenContext, SupportsNamespaces
from kvtier_core.layouts import ChunkLayout, KVGroup, KVKind, KVStructure
from kvtier_core.relays.relay import Untouched
from kvtier_core.types import EPOCH, ChunkKey, Namespace, Nbytes

if TYPE_CHECKING:  # its library is needed only for a tier with a key
    from kvtier_core.encoding.keyed_seal import KeyedSeal

#: The facts that tiers add to those of an engine.
_OF_TIERS = {"codec", "seal", "shards", "slots"}


@attrs.frozen
class Form:
    """The form of the frames of one namespace in a tier."""

    namespace: Namespace  #: in the tier
    codec: CodecIdentity
    keyed_seal: KeyedSeal | None
    in_bundle: Namespace  #: the namespace of the same frames in a bundle

    @classmethod
    def of(cls, tier: StoreTierConfig, namespace: Namespace) -> Self:
        """For a namespace in this tier. Raises BackendError and ConfigError."""
        packed = "slots" in dict(namespace.facts)
        keyed_seal = open_keyed_seal(tier)
        if isinstance(tier.serializer, RawConfig):
            return cls(namespace, PACKED if packed else RAW, keyed_seal, namespace)
        codec = identity_of(tier.serializer, packed=packed)
        if tier.config.shared:
            return cls(namespace, codec, keyed_seal, namespace)
        if keyed_seal is not None:
            why = "has a serializer and a seal_key, and is not shared, so that its frames cannot be in a bundle"
            raise BackendError(f"{tier.name}: {why}; use a shared tier")
        return cls(namespace, codec, None, namespace.narrowed("codec", codec.digest.hex()))

    @classmethod
    def of_bundle(cls, tier: StoreTierConfig, in_bundle: Namespace) -> Self:
        """For the namespace of a bundle. Raises BackendError if the tier cannot have its frames, and ConfigError."""
        facts = dict(in_bundle.facts)
        form = cls.of(tier, in_bundle if tier.config.shared else _without(in_bundle, {"codec"}))
        coded = not isinstance(tier.serializer, RawConfig)
        expected = {
            "codec": (form.codec.digest.hex() if coded else "", "serializer"),
            "seal": (str(form.keyed_seal.identity) if form.keyed_seal else "", "seal_key"),
        }
        for name, (ours, setting) in expected.items():
            if ours != (theirs := facts.get(name, "")):
                why = f"the {name} of its frames is {ours or 'none'}, of those in the bundle {theirs or 'none'}"
                raise BackendError(f"{tier.name}: {why}; choose the {setting} of the tier that was exported")
        return form

    def fault(self, frame: bytes, key: ChunkKey, namespace: Namespace) -> FrameError | None:
        """The first mismatch of a frame with this key, this namespace and this form. The payload is not verified."""
        keyed = self.keyed_seal.identity if self.keyed_seal else UNKEYED
        found = expected_header(memoryview(frame), namespace.digest, key, codec=self.codec, keyed=keyed)
        return found if isinstance(found, FrameError) else None


def engines_namespace(namespace: Namespace) -> Namespace:
    """The namespace of the engines whose frames a tier stores under this one: it names their chunks."""
    return _without(namespace, _OF_TIERS)


def moved(frame: bytes, header: Header, namespace: Namespace) -> bytes:
    """The frame with this header, in another namespace."""
    if header.namespace == namespace.digest:
        return frame
    changed = bytearray(frame)
    write_header(memoryview(changed), header._replace(namespace=namespace.digest))
    return bytes(changed)


def namespaces_of(tier: StoreTierConfig) -> list[Namespace]:
    """The namespaces with frames in the store of a tier that engines may still use. Nothing changes there.

    Raises BackendError.
    """
    nobodys = Namespace.of({"export": secrets.token_hex(16)})
    store = Untouched(opened(tier, nobodys, checking=True))
    with contextlib.closing(store):
        return [each for each in store.namespaces() if EPOCH not in dict(each.facts)]


def opened(tier: StoreTierConfig, namespace: Namespace, *, nbytes: int = 4096, checking: bool = False) -> Backend:
    """The store of a tier, for frames with payloads of ``nbytes``. Raises BackendError and ConfigError."""
    group = KVGroup("group 0", KVKind.FULL_ATTENTION, (nbytes,), 1, "uint8", KVStructure.OPAQUE)
    capacity = tier.capacity or Nbytes(0)
    ctx = OpenContext(namespace, ChunkLayout([group], 1), capacity, timeout=tier.timeout, checking=checking)
    store = tier.config.open(ctx)
    if not isinstance(store, SupportsNamespaces):
        store.close()
        raise BackendError(f"a tier of type {tier.config.type} does not know the namespaces of its frames")
    return store


def _without(namespace: Namespace, names: set[str]) -> Namespace:
    return Namespace.of({name: value for name, value in namespace.facts if name not in names})
