"""The quotas of a server, and the file in which they outlive it.

Operators write the quotas of models and of tenants in general, by hand or through the server; the server adds those of
single tenants. A tenant is named by a keyed digest of its salt, and the file has the key: no salt is written anywhere.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

import attrs
import msgspec
from msgspec import Struct

from kvtier_core.errors import BackendError, ConfigError, Problem
from kvtier_core.storekit.folder import Folder, place_in
from kvtier_core.types import Nbytes
from kvtier_serve.spaces import Spaces
from kvtier_serve.tenants import UNBOUNDED, Quota

logger = logging.getLogger("kvtier")


class Bounds(Struct, forbid_unknown_fields=True, omit_defaults=True):
    """Sizes such as ``8GiB``; null: any."""

    soft: str | None = None
    hard: str | None = None


class _File(Struct, forbid_unknown_fields=True):
    each_tenant: Bounds = msgspec.field(default_factory=Bounds)
    models: dict[str, Bounds] = msgspec.field(default_factory=dict)
    tenants: dict[str, Bounds] = msgspec.field(default_factory=dict)
    key: str = ""


@attrs.frozen
class Quotas:
    """All quotas of a server."""

    each_tenant: Quota = UNBOUNDED  #: that has none of its own
    models: Mapping[str, Quota] = attrs.field(factory=dict)  #: of each arena, by the name that engines give the model
    tenants: Mapping[str, Quota] = attrs.field(factory=dict)  #: of all arenas together, by the digest of the salt
    key: bytes = b""  #: of these digests


class QuotaBook:
    """The quotas in force. The owner's thread calls every method but `keep` and `read`."""

    def __init__(self, quotas: Quotas = Quotas(), file: Path | None = None):
        """``quotas`` apply if there is no ``file``. Raises as `read` does."""
        self._file = file
        self._lost = ""
        self._lock = threading.Lock()
        self.now = quotas if file is None else self.read()
        self._spaces: Spaces  # from `begin` on

    @property
    def lost(self) -> str:
        """Why the quotas end with the server; empty if they outlive it."""
        return self._lost if self._file else "the server has no quota file: start it with --quotas FILE"

    def begin(self, spaces: Spaces) -> None:
        """Bound what is in the memory of these spaces. Raises ConfigError."""
        self._spaces = spaces
        self.must_suit(self.now)
        self.apply(self.now)

    def must_suit(self, quotas: Quotas) -> None:
        """Raise ConfigError if these tenants are named with a key other than the server's."""
        if quotas.tenants and quotas.key != self._spaces.tenants.key:
            why = "its tenants are named with a different key than those in the server's memory"
            raise ConfigError([Problem(str(self._file), "$.tenants", why, "remove 'tenants' and 'key', or the memory")])

    def apply(self, quotas: Quotas) -> None:
        """Put these in force, and no others."""
        for model in {**self.now.models, **quotas.models}:
            self._spaces.set_quota(model, quotas.models.get(model, UNBOUNDED))
        self._spaces.tenants.set_quotas(quotas.each_tenant, quotas.tenants)
        self.now = attrs.evolve(quotas, key=self._spaces.tenants.key)

    def read(self) -> Quotas:
        """The quotas in the file; without one, those in force. Any thread may call this. Raises ConfigError."""
        if self._file is None:
            return self.now
        try:
            with self._lock, open(_folder_of(self._file).open(self._file.name, os.O_RDONLY), "rb") as file:
                written = msgspec.json.decode(file.read(), type=_File)
            key = bytes.fromhex(written.key)
        except FileNotFoundError:
            return Quotas()
        except (OSError, BackendError, ValueError) as error:
            raise ConfigError([Problem(str(self._file), "$", f"cannot read the quotas: {error}")]) from error
        with _problems(self._file, "each_tenant"):
            each_tenant = quota_of(written.each_tenant)
        return Quotas(each_tenant, self._decoded("models", written), self._decoded("tenants", written), key)

    def keep(self) -> str:
        """Write the quotas in force into the file. Any thread may call this. Returns `lost`."""
        if self._file is None:
            return self.lost
        self._lost = ""
        new = f"{self._file.name}.new"
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
            folder = _folder_of(self._file)
            with self._lock, open(folder.open(new, flags, marked=False), "wb") as file:
                file.write(msgspec.json.format(msgspec.json.encode(_written(self.now))) + b"\n")
                file.flush()
                os.fsync(file.fileno())
                folder.rename(new, folder, self._file.name)
        except (OSError, BackendError) as error:
            logger.warning("kvtier: the quotas are lost when this server stops: %s: %s", self._file, error)
            self._lost = f"{self._file}: {error}"
        return self._lost

    def _decoded(self, kind: str, written: _File) -> dict[str, Quota]:
        quotas = {}
        for name, bounds in getattr(written, kind).items():
            with _problems(self._file, f"{kind}.{name}"):
                quotas[name] = quota_of(bounds)
        return quotas


def _folder_of(file: Path) -> Folder:
    return Folder.at(place_in(file.parent))


def quota_of(bounds: Bounds) -> Quota:
    """Raises ValueError."""
    return checked(*(None if size is None else Nbytes.parse(size) for size in (bounds.soft, bounds.hard)))


def checked(soft: int | None, hard: int | None) -> Quota:
    """Raises ValueError if the hard quota could never let the soft one be reached."""
    if soft is not None and hard is not None and hard < soft:
        raise ValueError(f"the hard quota, {Nbytes(hard)}, is less than the soft one, {Nbytes(soft)}")
    return Quota(soft, hard)


def _written(quotas: Quotas) -> _File:
    tenants, models = ({name: _bounds(each) for name, each in of.items()} for of in (quotas.tenants, quotas.models))
    return _File(_bounds(quotas.each_tenant), models, tenants, quotas.key.hex())


def _bounds(quota: Quota) -> Bounds:
    return Bounds(*(None if size is None else str(Nbytes(size)) for size in (quota.soft, quota.hard)))


@contextlib.contextmanager
def _problems(file: Path | None, path: str) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise ConfigError([Problem(str(file), f"$.{path}", str(error))]) from error
