"""The HTTP interface for operators, on a thread of its own. The owner answers it between two calls of engines.

A request that changes something needs the token; beyond loopback every request does. A prompt is named by its tokens,
as `token_database: chained` names it. Keys and salts appear only in answers to requests that name them.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import json
import os
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import attrs
import msgspec
import uvicorn
from msgspec import Meta, Struct
from prometheus_client.core import CollectorRegistry
from prometheus_client.exposition import generate_latest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from kvtier_core.builtin.chained import Chained
from kvtier_core.errors import ContractError
from kvtier_core.forks import ProcessBound
from kvtier_core.observers.endpoint import Values
from kvtier_core.observers.readings import Readings
from kvtier_core.server.lent_arena import LentArena
from kvtier_core.server.protocol import plain
from kvtier_core.server.server import Server
from kvtier_core.server.sessions import Space
from kvtier_core.server.tenants import Quota
from kvtier_core.transfer.io_pool import run_aside
from kvtier_core.types import ChunkKey, Event

#: The environment variable with the token.
TOKEN = "KVTIER_HTTP_TOKEN"
#: Seconds in which the owner must answer: it has no call that takes as long.
_PROGRESS = 2.0
#: The share of a stack's first arena that all pinned prompts may take together.
_PINNED_SHARE = 4
#: The holder of a pinned prompt, behind the session number that no engine has.
_PINNED = "0/pin "
_PAGE = Path(__file__).with_name("status.html")
_FORM = "application/json"


class RefusedError(Exception):
    """The request cannot be carried out; the message says why."""


class Prompt(Struct, forbid_unknown_fields=True):
    """A prompt of an engine of this server."""

    tokens: Annotated[list[Annotated[int, Meta(ge=0, lt=1 << 32)]], Meta(max_length=1 << 20)]
    cache_salt: str = ""
    namespace: str = ""  #: the beginning of its digest in hexadecimal digits; may be left out if there is one


class Scope(Struct, forbid_unknown_fields=True):
    """One namespace, or all."""

    namespace: str = ""


class Health(Struct):
    """The owner's thread has answered."""

    boot: str
    uptime: float  #: seconds
    sessions: int


class Chunk(Struct):
    """Where a chunk can be loaded from, and why it cannot."""

    key: str
    tiers: list[str]
    miss_reason: str


class Explained(Struct):
    """The chunks of a prompt."""

    chunk_tokens: int
    chunks: list[Chunk]


class QuotaOf(Struct, forbid_unknown_fields=True):
    """Bytes of all arenas together; null: any number."""

    cache_salt: str
    soft: Annotated[int, Meta(ge=0)] | None = None
    hard: Annotated[int, Meta(ge=0)] | None = None


class ModelQuota(Struct, forbid_unknown_fields=True):
    """Bytes of each arena; null: any number."""

    model: str  #: as /status has it
    soft: Annotated[int, Meta(ge=0)] | None = None
    hard: Annotated[int, Meta(ge=0)] | None = None


class Tenant(Struct):
    """A tenant that has chunks in memory. One without a salt is ``-``."""

    tenant: str
    nbytes: int
    soft: int | None
    hard: int | None


class Condemned(Struct, forbid_unknown_fields=True):
    """What is erased: all of a tenant, all of a namespace, or what a tenant has in a namespace."""

    cache_salt: str = ""
    namespace: str = ""


class Erased(Struct):
    """What was deleted in each tier, and what could not be reached."""

    deleted: dict[str, int]
    unreachable: list[str]


class Done(Struct):
    """The number of chunks that it concerned."""

    chunks: int


class Operation(NamedTuple):
    """A route."""

    method: str
    path: str
    work: Callable[..., Any]  #: done on the owner's thread, with the console and what was asked
    result: type
    body: type | None = None
    changes: bool = False  #: does it need the token?


class Console:
    """Looks into a server, and acts on it. Every method is called on the owner's thread."""

    def __init__(self, server: Server):
        self._server = server
        self._since = time.monotonic()
        self._readings: dict[Space, Readings] = {}
        self._values: dict[Space, Values] = {}
        self.metrics = CollectorRegistry(auto_describe=False)
        server.spaces.listeners.append(self._observe)

    def _observe(self, space: Space, events: list[Event]) -> None:
        if space not in self._readings:
            self._readings[space], self._values[space] = Readings(), Values(space.number)
            self.metrics.register(self._values[space])
        self._values[space].add(self._readings[space].add(events))

    def health(self) -> Health:
        """Does the server make progress?"""
        uptime = time.monotonic() - self._since
        return Health(f"{self._server.boot:x}", round(uptime, 3), len(self._server.sessions))

    def status(self) -> dict[str, Any]:
        """Memory, namespaces with their tiers, and engines."""
        spaces = self._server.spaces
        return {
            **msgspec.to_builtins(self.health()),
            "at": time.time(),
            "memory": [
                {
                    "tier": memory.tier.name,
                    "nbytes": memory.extents.nbytes,
                    "free": memory.extents.free * memory.extents.extent_nbytes,
                    "kept": memory.journal is not None,
                    "former_users": memory.is_used_by_others(self._server.boot),
                }
                for memory in spaces.memories
            ],
            "namespaces": [
                {
                    "number": space.number,
                    "namespace": space.namespace.digest.hex(),
                    "model": space.model,
                    "engines": len(space.sessions),
                    "asked": space.asked,
                    "found": space.found,
                    "tiers": [
                        {**attrs.asdict(each), **self._readings.get(space, Readings()).of(each.tier).describe()}
                        for each in space.stack.usage()
                    ],
                }
                for space in spaces
            ],
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
        }

    def explain(self, prompt: Prompt) -> Explained:
        """Where the chunks of a prompt are."""
        space, path = self._named(prompt)
        chunks = [
            Chunk(key.hex(), list(where.tiers), where.miss_reason)
            for key, where in zip(path, space.stack.whereabouts(path), strict=True)
        ]
        return Explained(space.layout.tokens, chunks)

    def prefetch(self, prompt: Prompt) -> Done:
        """Bring the chunks of a prompt into memory, ahead of its request."""
        space, path = self._named(prompt)
        space.stack.prefetch(path, None, _salt(prompt.cache_salt), space.stack.media)
        return Done(len(path))

    def pin(self, prompt: Prompt, name: str) -> Done:
        """Keep the chunks of a prompt that are in memory there, until the pin of this name is deleted."""
        space, path = self._named(prompt)
        arena, holder = space.stack.arenas[0], _PINNED + name
        space.stack.release(holder)
        pinned = sum(pins for other, pins in space.stack.pins_by_holder().items() if other.startswith(_PINNED))
        room = max(0, arena.capacity // _PINNED_SHARE - pinned)
        salt = _salt(prompt.cache_salt)
        return Done(space.stack.lookup(path[:room], holder, None, salt, not_direct=space.stack.media).chunks)

    def unpin(self, name: str) -> Done:
        """Delete a pin."""
        pins = sum(space.stack.pins_by_holder()[_PINNED + name] for space in self._server.spaces)
        for space in self._server.spaces:
            space.stack.release(_PINNED + name)
        return Done(pins)

    def clear(self, scope: Scope) -> Done:
        """Drop what the memory of a namespace, or of all, holds and nobody uses."""
        spaces = [self._space(scope.namespace)] if scope.namespace else list(self._server.spaces)
        return Done(
            sum(self._drop(space, arena, arena.unused_chunks()) for space in spaces for arena in space.stack.arenas)
        )

    def tenants(self) -> list[Tenant]:
        """The memory that each tenant has, and may have."""
        tenants = self._server.spaces.tenants
        quotas = {name: tenants.quota(name) for name in tenants.used}
        return [Tenant(name, nbytes, quotas[name].soft, quotas[name].hard) for name, nbytes in tenants.used.items()]

    def set_quota(self, quota: QuotaOf) -> list[Tenant]:
        """Bound the memory of one tenant, until the server ends."""
        self._server.spaces.tenants.set_quota(_salt(quota.cache_salt), Quota(quota.soft, quota.hard))
        return self.tenants()

    def set_model_quota(self, quota: ModelQuota) -> dict[str, int]:
        """Bound the memory of one model, until the server ends. Returns the bytes that it has in each arena now."""
        self._server.spaces.set_quota(quota.model, Quota(quota.soft, quota.hard))
        extents = {memory.tier.name: memory.extents for memory in self._server.spaces.memories}
        return {name: each.of_model(quota.model) * each.extent_nbytes for name, each in extents.items()}

    def erase(self, condemned: Condemned) -> Erased:
        """Delete the chunks of a tenant or a namespace from every tier, as far as they can be told apart."""
        if not condemned.cache_salt and not condemned.namespace:
            raise RefusedError("name a cache_salt, a namespace, or both")
        spaces = [self._space(condemned.namespace)] if condemned.namespace else list(self._server.spaces)
        tenants = self._server.spaces.tenants
        tenant = tenants.name(_salt(condemned.cache_salt)) if condemned.cache_salt else None
        deleted: Counter[str] = Counter()
        unreachable = []
        for space in spaces:
            for arena in space.stack.arenas:
                deleted[arena.name] += self._drop(space, arena, arena.of_tenant(tenant))
            for tier in space.stack.tiers:
                keys = [key for key in tier.index.resident if tenant in (None, tenants.of(key))]
                if tier.backend.shared:
                    unreachable.append(f"{tier.name}: other engines use the store; kvtier clear --shared empties it")
                    continue
                deleted[tier.name] += tier.erase(keys)
                if tenant is not None:
                    why = "frames that no request has named since the server started are not told apart by tenant"
                    unreachable.append(f"{tier.name}: {why}")
        return Erased(dict(deleted), unreachable)

    def _drop(self, space: Space, arena: LentArena, keys: list[ChunkKey]) -> int:
        space.stack.evicted(arena, arena.drop(keys), "on request")
        return len(keys)

    def _space(self, namespace: str) -> Space:
        found = [space for space in self._server.spaces if space.namespace.digest.hex().startswith(namespace)]
        if len(found) != 1:
            raise RefusedError(f"{len(found)} namespaces begin with {namespace!r}; name one, as /status has it")
        return found[0]

    def _named(self, prompt: Prompt) -> tuple[Space, list[ChunkKey]]:
        space = self._space(prompt.namespace)
        return space, Chained(space.namespace, space.layout.tokens).keys(prompt.tokens, salt=_salt(prompt.cache_salt))


def _salt(cache_salt: str) -> bytes:
    """As `vllm.requests.identity` makes it, for a request without an adapter."""
    return json.dumps({"cache_salt": cache_salt}).encode() if cache_salt else b""


OPERATIONS = (
    Operation("GET", "/health", Console.health, Health),
    Operation("GET", "/status", Console.status, dict[str, Any]),
    Operation("POST", "/explain", Console.explain, Explained, Prompt),
    Operation("POST", "/prefetch", Console.prefetch, Done, Prompt, changes=True),
    Operation("PUT", "/pins/{name}", Console.pin, Done, Prompt, changes=True),
    Operation("DELETE", "/pins/{name}", Console.unpin, Done, changes=True),
    Operation("POST", "/clear", Console.clear, Done, Scope, changes=True),
    Operation("GET", "/tenants", Console.tenants, list[Tenant]),
    Operation("PUT", "/quota", Console.set_quota, list[Tenant], QuotaOf, changes=True),
    Operation("PUT", "/quota/model", Console.set_model_quota, dict[str, int], ModelQuota, changes=True),
    Operation("POST", "/erase", Console.erase, Erased, Condemned, changes=True),
)


class HTTP(ProcessBound):
    """Serves until it is closed, on a thread."""

    def __init__(self, server: Server, host: str, port: int):
        """Raises ContractError for an address beyond loopback without a token, OSError if it cannot be had."""
        self._server = server
        self._token = os.environ.get(TOKEN, "")
        self._guarded = not _is_loopback(host)
        if self._guarded and not self._token:
            raise ContractError(f"{host} is reached from other machines: set the environment variable {TOKEN}")
        self._console = Console(server)
        routes = [Route(each.path, self._endpoint(each), methods=[each.method]) for each in OPERATIONS]
        routes += [Route("/metrics", self._metrics), Route("/openapi.json", self._schema), Route("/", self._page)]
        config = uvicorn.Config(Starlette(routes=routes), host, port, log_level="warning", lifespan="off")
        self._socket = config.bind_socket()
        self._socket.listen()  # from now on nobody is refused
        self.port = self._socket.getsockname()[1]
        self._uvicorn = uvicorn.Server(config)
        self._thread = run_aside(lambda: self._uvicorn.run(sockets=[self._socket]), "http")

    def close(self) -> None:
        """Serve no more."""
        self._uvicorn.should_exit = self._uvicorn.force_exit = True
        self._thread.join(_PROGRESS)
        self._socket.close()

    # -- on its thread -------------------------------------------------------------------------------

    def _endpoint(self, operation: Operation) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            if refusal := self._refusal(request, changes=operation.changes):
                return refusal
            try:
                body = await request.body()
                asked = [msgspec.json.decode(body, type=operation.body)] if operation.body else []
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                return JSONResponse({"error": str(error)}, 400)
            return await self._asked(lambda: operation.work(self._console, *asked, **request.path_params))

        return answer

    async def _asked(self, work: Callable[[], Any]) -> Response:
        """Have the owner do it."""
        future: Future[Any] = self._server.ask(work)
        try:
            found = await asyncio.wait_for(asyncio.wrap_future(future), _PROGRESS)
        except TimeoutError:
            return JSONResponse({"error": f"the server has made no progress for {_PROGRESS} s"}, 503)
        except (RefusedError, ContractError) as error:
            return JSONResponse({"error": str(error)}, 409)
        return Response(msgspec.json.encode(found, enc_hook=plain), media_type=_FORM)

    def _refusal(self, request: Request, *, changes: bool = False) -> Response | None:
        """Why a request is not granted; None if it is."""
        given = request.headers.get("authorization", "").removeprefix("Bearer ")
        if self._token and hmac.compare_digest(given.encode(), self._token.encode()):
            return None
        if changes and not self._token:
            return JSONResponse({"error": f"set the environment variable {TOKEN} of the server first"}, 403)
        if changes or self._guarded:
            return JSONResponse({"error": "this needs the token"}, 401, {"WWW-Authenticate": "Bearer"})
        if not _is_loopback(request.url.hostname or ""):  # a page of another site, under a name that leads here
            return JSONResponse({"error": "write the address as 127.0.0.1 or localhost"}, 403)
        return None

    async def _metrics(self, request: Request) -> Response:
        return self._refusal(request) or PlainTextResponse(generate_latest(self._console.metrics))

    async def _schema(self, request: Request) -> Response:
        return self._refusal(request) or JSONResponse(schema())

    async def _page(self, request: Request) -> Response:
        return self._refusal(request) or HTMLResponse(_PAGE.read_text("utf-8"))


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def schema() -> dict[str, Any]:
    """All of it in OpenAPI 3.1."""
    types = [each for operation in OPERATIONS for each in (operation.body, operation.result) if each]
    of, components = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
    schemas = dict(zip(map(str, types), of, strict=True))
    paths: dict[str, Any] = {}
    for each in OPERATIONS:
        said = {"description": each.work.__doc__, "content": {_FORM: {"schema": schemas[str(each.result)]}}}
        told: dict[str, Any] = {"operationId": each.work.__name__, "summary": each.work.__doc__}
        told["responses"] = {"200": said, "401": {"description": "It needs the token."}}
        if "{name}" in each.path:
            told["parameters"] = [{"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}]
        if each.body:
            told["requestBody"] = {"required": True, "content": {_FORM: {"schema": schemas[str(each.body)]}}}
        if each.changes:
            told["security"] = [{"token": []}]
        paths.setdefault(each.path, {})[each.method.lower()] = told
    security = {"token": {"type": "http", "scheme": "bearer"}}
    info = {"title": "kvtier serve", "version": "1"}
    return {
        "openapi": "3.1.0",
        "info": info,
        "paths": paths,
        "components": {"schemas": components, "securitySchemes": security},
    }
