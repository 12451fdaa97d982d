"""What an operator may ask of a server, and have it do, on the owner's thread.

A prompt is named by its tokens, as `token_database: chained` names it, or by its keys. Salts, and keys except those of
/held, appear only in answers to requests that name them. Work that may take longer is a generator; the owner does a
piece of it in each turn.
"""

from __future__ import annotations

import json
import logging
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

import attrs
import msgspec
from msgspec import Struct

from kvtier_core.builtin.chained import Chained
from kvtier_core.engine.request_view import KVIdentity
from kvtier_core.errors import ContractError
from kvtier_core.layouts import is_marked, tenant_mark
from kvtier_core.types import ChunkKey
from kvtier_serve.lent_arena import LentArena
from kvtier_serve.operators.arranging import Search
from kvtier_serve.operators.forms import (
    AllQuotas,
    Arranged,
    Brought,
    Chunk,
    Condemned,
    Documents,
    Done,
    Erased,
    Explained,
    Health,
    Held,
    HeldOf,
    Limits,
    ModelQuota,
    Pin,
    Pinned,
    PinOf,
    Prompt,
    QuotaOf,
    RefusedError,
    Scope,
    Tenant,
)
from kvtier_serve.operators.metrics import ServerMetrics
from kvtier_serve.quotas import checked
from kvtier_serve.reload import Files, Reloaded
from kvtier_serve.server import Server
from kvtier_serve.sessions import Space
from kvtier_serve.tenants import Quota

logger = logging.getLogger("kvtier")

T = TypeVar("T")

#: Chunks, or tenants, that the owner looks at between two calls of engines; and chunks that it erases.
_PIECE, _ERASED = 128, 64
#: And namespaces that it describes.
_SPACES = 16
#: Fields of a request that no log may have.
_SECRET = {"tokens", "keys", "cache_salt"}
#: Results that the log repeats.
_LOGGED = Done | Brought | Pinned | Erased | Reloaded


class Named(NamedTuple):
    """A prompt by the keys of its chunks."""

    space: Space
    path: list[ChunkKey]
    salt: bytes


class Operation(NamedTuple):
    """A route."""

    method: str
    path: str
    #: Done on the owner's thread, with the console, what `Console.name` made of a prompt, and what was asked.
    work: Callable[..., Any]
    result: type
    body: type | None = None
    changes: bool = False  #: does it need the token, and a line in the log?
    #: Done afterwards on another thread, since it waits for a disk: with the console and the result, which it returns.
    finish: Callable[[Any, Any], Any] = lambda console, found: found
    #: Done before on another thread, with the console: further arguments of ``work``.
    prepare: Callable[[Any], tuple[Any, ...]] = lambda console: ()


class Console:
    """Looks into a server, and acts on it. Every method but `keep_quotas` is called on the owner's thread."""

    def __init__(self, server: Server):
        self._server = server
        self._since = time.monotonic()
        self.metrics = ServerMetrics(server)

    def carry_out(
        self, operation: Operation, who: str, asked: Struct | None, *arguments: Any, **named: str
    ) -> Generator[None, None, Any]:
        """Do what was ``asked``, with these ``arguments``. A change is logged: who, what, and how much."""
        found = operation.work(self, *arguments, **named)
        if isinstance(found, Generator):
            found = yield from found
        if operation.changes:
            told = msgspec.to_builtins(found) if isinstance(found, _LOGGED) else {}
            facts = {**named, **(self._told(asked) if asked else {}), **told}
            words = ", ".join(f"{name} {json.dumps(value)}" for name, value in facts.items())
            logger.info("kvtier: operator %s: %s %s: %s", who, operation.method, operation.path, words)
        return found

    def _told(self, body: Struct) -> dict[str, Any]:
        """What a log may contain of a request. A salt is named as in /tenants."""
        fields = msgspec.structs.asdict(body).items()
        told = {name: value for name, value in fields if name not in _SECRET and value not in ("", None)}
        salt = getattr(body, "cache_salt", "")
        return {"tenant": self._tenant(salt), **told} if salt else told

    def _tenant(self, cache_salt: str) -> str:
        """As /tenants names the tenant of this salt."""
        return self._server.spaces.tenants.name(KVIdentity.of(cache_salt).salt)

    def health(self) -> Health:
        """Does the server make progress?"""
        uptime = time.monotonic() - self._since
        return Health(f"{self._server.boot:x}", round(uptime, 3), len(self._server.sessions))

    def status(self) -> Generator[None, None, dict[str, Any]]:
        """Memory, namespaces with their tiers, engines, and programs."""
        spaces, namespaces = self._server.spaces, []
        for number, space in enumerate(list(spaces)):
            namespaces.append(self._describe(space))
            if number % _SPACES == _SPACES - 1:
                yield
        return {
            **msgspec.to_builtins(self.health()),
            "at": time.time(),
            "memory": [
                {
                    "tier": memory.tier.name,
                    "nbytes": memory.extents.nbytes,
                    "free": memory.extents.free_nbytes,
                    "kept": memory.journal is not None,
                    "former_users": memory.is_used_by_others(self._server.boot),
                }
                for memory in spaces.memories
            ],
            "namespaces": namespaces,
            "engines": [
                {
                    "session": session.number,
                    "name": session.name,
                    "namespace": session.space.number,
                    "workers": len(session.workers),
                    "holders": session.held,
                    "hung_up": session.hung_up,
                }
                for session in self._server.sessions.values()
            ],
            "programs": [
                {"name": name, **attrs.asdict(condition)}
                for name, condition in self._server.programs.conditions().items()
            ],
        }

    def _describe(self, space: Space) -> dict[str, Any]:
        readings = self.metrics.of(space)
        return {
            "number": space.number,
            "namespace": space.namespace.digest.hex(),
            "model": space.model,
            "engines": len(space.sessions),
            "asked": space.asked,
            "found": space.found,
            "tiers": [{**attrs.asdict(each), **readings.of(each.tier).describe()} for each in space.stack.usage()],
        }

    def explain(self, prompt: Named) -> Generator[None, None, Explained]:
        """Where the chunks of a prompt are."""
        chunks: list[Chunk] = []
        for keys in _pieces(prompt.path):
            found = prompt.space.stack.whereabouts(keys)
            chunks += [Chunk(key.hex(), list(at.tiers), at.miss_reason) for key, at in zip(keys, found, strict=True)]
            yield
        return Explained(prompt.space.layout.tokens, chunks)

    def arrange(self, asked: Documents) -> Generator[None, None, Arranged]:
        """Find the order of documents with the longest cached prefix. Shared stores are not queried."""
        space = self._space(asked.namespace)
        keys, identity = Chained(space.namespace, space.layout.tokens), KVIdentity.of(asked.cache_salt)

        def is_cached(digest: ChunkKey) -> bool:
            return bool(space.stack.whereabouts(space.layout.keys([digest], identity.tenant))[0].tiers)

        return Search(asked, keys, space.layout.tokens, identity.salt, is_cached).arranged()

    def prefetch(self, prompt: Named) -> Generator[None, None, Brought]:
        """Bring the chunks of a prompt into memory, ahead of its request."""
        for each in prompt.space.pins.prefetch(prompt.path, prompt.salt):
            told = each
            yield
        return Brought(**told)

    def held(self, asked: HeldOf) -> Generator[None, None, Held]:
        """Name the chunks in the memory of a namespace, so that others can ask their peers for them."""
        parents: dict[ChunkKey, ChunkKey | None] = {}
        after = defaultdict[ChunkKey | None, list[ChunkKey]](list)
        for arena in self._space(asked.namespace).arenas:
            for keys in _pieces(arena.of_tenant(None)):
                chunks = (key for key in keys if arena.index.chunk_of(key) == key and arena.has(key))
                parents.update((key, arena.index.resident.parent(key)) for key in chunks)
                yield
        for keys in _pieces(list(parents)):
            for key in keys:
                after[parents[key] if parents[key] in parents else None].append(key)
            yield
        named = [(key, -1) for key in after[None][: asked.most]]
        for at, (key, _) in enumerate(named):  # which grows meanwhile
            named += [(child, at) for child in after[key][: asked.most - len(named)]]
            if at % _PIECE == _PIECE - 1:
                yield
        return Held([(key.hex(), at) for key, at in named], len(parents) - len(named))

    def pin(self, prompt: Named, pin: PinOf, name: str) -> Pinned:
        """Keep the chunks of a prompt in memory, until the pin of this name is deleted or expires.

        Chunks in stores come into memory first.
        """
        self.unpin(name)
        return Pinned(**prompt.space.pins.pin(name, prompt.path, prompt.salt, pin.seconds))

    def pins(self) -> list[Pin]:
        """All pins."""
        return [
            Pin(namespace=space.number, model=space.model, **each)
            for space in self._server.spaces
            for each in space.pins.listed()
        ]

    def unpin(self, name: str) -> Done:
        """Delete a pin."""
        return Done(sum(space.pins.unpin(name) for space in self._server.spaces))

    def clear(self, scope: Scope) -> Generator[None, None, Done]:
        """Drop what the memory of a namespace, or of all, holds and nobody uses."""
        spaces, count = [self._space(scope.namespace)] if scope.namespace else list(self._server.spaces), 0
        for space in spaces:
            for arena in space.arenas:
                for keys in _pieces(arena.of_tenant(None)):
                    count += self._drop(space, arena, arena.unused(keys))
                    yield
        return Done(count)

    def tenants(self) -> Generator[None, None, list[Tenant]]:
        """The memory that each tenant has, and may have."""
        tenants, told = self._server.spaces.tenants, []
        for names in _pieces(tenants.names):
            for name in names:
                if nbytes := tenants.used_by(name):
                    quota = tenants.quota(name)
                    told.append(Tenant(name, nbytes, quota.soft, quota.hard))
            yield
        return told

    def quotas(self) -> AllQuotas:
        """The bounds of tenants and models, and whether they outlive the server."""
        now = self._server.quotas.now
        tenants, models = ({name: _limits(each) for name, each in of.items()} for of in (now.tenants, now.models))
        return AllQuotas(_limits(now.each_tenant), tenants, models, self._server.quotas.lost)

    def set_quota(self, quota: QuotaOf) -> AllQuotas:
        """Bound the memory of one tenant."""
        return self._bound("tenants", self._tenant(quota.cache_salt), quota)

    def set_model_quota(self, quota: ModelQuota) -> Generator[None, None, AllQuotas]:
        """Bound the memory of one model."""
        known = {space.model for space in self._server.spaces} | self._server.quotas.now.models.keys()
        if quota.model not in known:
            raise RefusedError(f"no engine of {quota.model!r} has been here; /status has the names of models")
        found = self._bound("models", quota.model, quota)
        while quota.model in self._server.spaces.shrinking:
            yield
        return found

    def _bound(self, kind: str, name: str, quota: QuotaOf | ModelQuota) -> AllQuotas:
        try:
            bounds = checked(quota.soft, quota.hard)
        except ValueError as error:
            raise RefusedError(str(error)) from error
        now = self._server.quotas.now
        changed: dict[str, Any] = {kind: {**getattr(now, kind), name: bounds}}
        self._server.quotas.apply(attrs.evolve(now, **changed))
        return self.quotas()

    def keep_quotas(self, found: AllQuotas) -> AllQuotas:
        """Write the quotas into their file, if there is one. Any thread may call this."""
        found.lost = self._server.quotas.keep()
        return found

    def read_files(self) -> tuple[Files]:
        """The contents of the server's files. Any thread may call this. Raises ConfigError and RefusedError."""
        if self._server.reload is None:
            raise RefusedError("this server was started without a file")
        return (self._server.reload.read(),)

    def reload(self, files: Files) -> Reloaded:
        """Read the server's files again, and take what can change while it runs. Refused as a whole if they are wrong.

        That is quotas, programs, and of store tiers the capacity of a private disk and inflight.
        """
        assert self._server.reload is not None, "`read_files` refuses"
        return self._server.reload.apply(files)

    def erase(self, condemned: Condemned) -> Generator[None, None, Erased]:
        """Delete the chunks of a tenant or a namespace from every tier, as far as they can be told apart."""
        if not condemned.cache_salt and not condemned.namespace:
            raise RefusedError("name a cache_salt, a namespace, or both")
        spaces = [self._space(condemned.namespace)] if condemned.namespace else list(self._server.spaces)
        mark = tenant_mark(condemned.cache_salt)
        deleted: Counter[str] = Counter()
        left: Counter[str] = Counter()
        overwritten = {}
        unreachable = {"memory: what was evicted before is overwritten when its room is used again": None}
        if not condemned.namespace:
            unreachable["stores: models without an engine since the start; kvtier clear reaches them"] = None
        for space in spaces:
            tiers = list(space.stack.tiers)  # others may open meanwhile
            open_now = (arena.name for arena in space.arenas), (tier.name for tier in tiers)
            absent = set(space.stack.media).difference(*open_now)
            unreachable.update(
                {f"{tier}: not open; its chunks are found once it opens": None for tier in sorted(absent)}
            )
            for arena in space.arenas:
                deleted[arena.name] += 0
                for some in _pieces(arena.of_tenant(None), _ERASED):
                    own = [key for key in _of_tenant(some, mark) if arena.has_slot(key)]
                    deleted[arena.name] += len(own)
                    space.stack.evicted(arena, arena.erase(own), "on request")
                    yield
                left[arena.name] += arena.erasing
                overwritten[arena.name] = True
            for tier in tiers:
                if tier.backend.shared:
                    unreachable[f"{tier.name}: others use it; kvtier clear --shared removes what is in a store"] = None
                    continue
                if tier.backend.remains:
                    unreachable[f"{tier.name}: {tier.backend.remains}"] = None
                deleted[tier.name] += tier.erase([])  # damaged frames, whose tenants are unknown
                for some in _pieces(list(tier.index.resident), _ERASED):
                    if own := _of_tenant(some, mark):
                        deleted[tier.name] += tier.erase(own)
                    yield
                left[tier.name] += tier.erasing
                overwritten[tier.name] = not tier.backend.remains
        erased = [space.namespace.digest.hex() for space in spaces]
        tenant = self._tenant(condemned.cache_salt) if mark else ""
        return Erased(time.time(), tenant, erased, deleted, overwritten, left, list(unreachable))

    def _drop(self, space: Space, arena: LentArena, keys: list[ChunkKey]) -> int:
        space.stack.evicted(arena, arena.drop(keys), "on request")
        return len(keys)

    def _space(self, namespace: str) -> Space:
        found = [space for space in self._server.spaces if space.namespace.digest.hex().startswith(namespace)]
        if len(found) != 1:
            raise RefusedError(f"{len(found)} namespaces begin with {namespace!r}; name one, as shown by /status")
        return found[0]

    def name(self, prompt: Prompt) -> Callable[[], Named]:
        """Returns what names the chunks of a prompt on any thread: the longest prompt takes half a second."""
        space, tokens = self._space(prompt.namespace), prompt.tokens
        if (tokens is None) == (not prompt.keys):
            raise RefusedError("name a prompt by its tokens, or by the keys of its chunks")
        path = [ChunkKey(bytes.fromhex(key)) for key in prompt.keys]
        try:
            space.layout.check_path(path)
        except ContractError as error:
            raise RefusedError(str(error)) from error
        keys, identity = Chained(space.namespace, space.layout.tokens), KVIdentity.of(prompt.cache_salt)

        def named() -> Named:
            if tokens is None:
                return Named(space, path, identity.salt)
            digests = keys.keys(tokens, salt=identity.salt)
            return Named(space, space.layout.keys(digests, identity.tenant), identity.salt)

        return named


def _pieces(many: Sequence[T], size: int = _PIECE) -> list[Sequence[T]]:
    """A list in pieces that do not keep engines waiting."""
    return [many[begin : begin + size] for begin in range(0, len(many), size)]


def _of_tenant(keys: Iterable[ChunkKey], mark: bytes) -> list[ChunkKey]:
    """The keys of the tenant with this mark; all if it is empty."""
    return [key for key in keys if not mark or is_marked(key, mark)]


def _limits(quota: Quota) -> Limits:
    return Limits(quota.soft, quota.hard)


OPERATIONS = (
    Operation("GET", "/health", Console.health, Health),
    Operation("GET", "/status", Console.status, dict[str, Any]),
    Operation("POST", "/explain", Console.explain, Explained, Prompt),
    Operation("POST", "/arrange", Console.arrange, Arranged, Documents),
    Operation("POST", "/held", Console.held, Held, HeldOf),
    Operation("POST", "/prefetch", Console.prefetch, Brought, Prompt, changes=True),
    Operation("GET", "/pins", Console.pins, list[Pin]),
    Operation("PUT", "/pins/{name}", Console.pin, Pinned, PinOf, changes=True),
    Operation("DELETE", "/pins/{name}", Console.unpin, Done, changes=True),
    Operation("POST", "/clear", Console.clear, Done, Scope, changes=True),
    Operation("GET", "/tenants", Console.tenants, list[Tenant]),
    Operation("GET", "/quota", Console.quotas, AllQuotas),
    Operation("PUT", "/quota", Console.set_quota, AllQuotas, QuotaOf, True, Console.keep_quotas),
    Operation("PUT", "/quota/model", Console.set_model_quota, AllQuotas, ModelQuota, True, Console.keep_quotas),
    Operation("POST", "/reload", Console.reload, Reloaded, changes=True, prepare=Console.read_files),
    Operation("POST", "/erase", Console.erase, Erased, Condemned, changes=True),
)
