"""The HTTP interface in OpenAPI."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Iterable
from typing import Any, NamedTuple

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from kvtier_serve.operators.console import OPERATIONS, Operation

FORM = "application/json"
#: All that a stranger is told.
ALIVE = {"type": "object", "properties": {"alive": {"type": "boolean"}}, "required": ["alive"]}
#: What a refusal says.
_WHY = {"type": "object", "properties": {"error": {"type": "string"}}, "required": ["error"]}
#: Of those who have not proved who they are, and of those who may change nothing.
UNPROVEN, FOR_GET = 401, 403
#: Why a request may be refused, by the status of the answer.
REFUSALS = {
    400: "the body is not what is described here",
    UNPROVEN: "this needs the token",
    FOR_GET: "this token is for what changes nothing",
    409: "it cannot be carried out",
    413: "the body is longer than any prompt",
    503: "the server did not respond in time",
}


def refusals(each: Operation) -> list[int]:
    """The statuses of refusals of an operation. Who cannot be refused for lack of a token needs none."""
    return [UNPROVEN, 409, 503, *([400, 413] if each.body else []), *([FOR_GET] if each.method != "GET" else [])]


class Page(NamedTuple):
    """A route that is no operation, and the type of its answer."""

    path: str
    work: Callable[[Request], Awaitable[Response]]
    form: str
    refusals: tuple[int, ...] = ()


def schema(pages: Iterable[Page]) -> dict[str, Any]:
    """All of it in OpenAPI 3.1."""
    types = [each for operation in OPERATIONS for each in (operation.body, operation.result) if each]
    of, components = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
    schemas = dict(zip(map(str, types), of, strict=True))
    paths: dict[str, Any] = {}
    for each in OPERATIONS:
        paths.setdefault(each.path, {})[each.method.lower()] = _operation(each, schemas)
    for page in pages:
        paths[page.path] = {"get": _told(page.work, page.form, {}, page.refusals)}
    token = {"type": "http", "scheme": "bearer", "description": "Not needed on the Unix socket of operators."}
    return {
        "openapi": "3.1.0",
        "info": {"title": "kvtier serve", "version": "1"},
        "paths": paths,
        "components": {"schemas": components, "securitySchemes": {"token": token}},
    }


def _operation(each: Operation, schemas: dict[str, Any]) -> dict[str, Any]:
    result = schemas[str(each.result)]
    if each.path == "/health":
        return _told(each.work, FORM, {"anyOf": [result, ALIVE]}, [503])
    told = _told(each.work, FORM, result, refusals(each))
    if "{name}" in each.path:
        told["parameters"] = [{"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}]
    if each.body:
        told["requestBody"] = {"required": True, "content": {FORM: {"schema": schemas[str(each.body)]}}}
    return told


def _told(work: Callable[..., Any], form: str, result: dict[str, Any], refused: Collection[int]) -> dict[str, Any]:
    responses = {"200": {"description": work.__doc__, "content": {form: {"schema": result}}}}
    for status in sorted(refused):
        responses[str(status)] = {"description": REFUSALS[status], "content": {FORM: {"schema": _WHY}}}
    told = {"operationId": work.__name__.strip("_"), "summary": work.__doc__, "responses": responses}
    return {**told, "security": [{"token": []}]} if UNPROVEN in refused else told
