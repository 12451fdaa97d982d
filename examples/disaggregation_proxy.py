"""A proxy in front of vLLM servers: some compute the prompts, the others decode behind them.

    python examples/disaggregation_proxy.py --prefill http://127.0.0.1:8001 --decode http://127.0.0.1:8002 --port 8000

All servers run kvtier with a tier that they share (docs/disaggregation.md). The `kv_transfer_params` are those of
vLLM's NIXL connector. A prompt that no server of the first kind could compute is computed by one of the second.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from typing import Any

import httpx
import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse

#: For the server that computes the prompt.
PREFILL = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
#: Parameters of a request that say how much is generated, and how it is sent.
GENERATES = ("stream_options", "min_tokens", "max_completion_tokens", "n", "best_of")
#: Seconds to connect, and seconds without a byte.
TIMEOUT = httpx.Timeout(600, connect=5)
#: Seconds for which a server that did not answer is asked after all others.
REST = 5.0


class Servers:
    """Servers of one kind, by their URLs."""

    def __init__(self, urls: Sequence[str]):
        self.urls = [url.rstrip("/") for url in urls]
        self.requests: Counter[str] = Counter()  #: under way
        self._rest: dict[str, float] = {}

    def in_turn(self) -> list[str]:
        """The one with the fewest requests first; behind all others, those that did not answer lately."""
        now = time.monotonic()
        return sorted(self.urls, key=lambda url: (self._rest.get(url, 0.0) > now, self.requests[url]))

    def failed(self, url: str) -> None:
        """This one does not answer."""
        self._rest[url] = time.monotonic() + REST


def forwarded(request: Request) -> dict[str, str]:
    """The headers of a client that a server is to see."""
    return {name: request.headers[name] for name in ("authorization", "x-request-id") if name in request.headers}


async def prefill(
    client: httpx.AsyncClient, servers: Servers, path: str, asked: dict[str, Any], headers: dict[str, str]
) -> dict | None:
    """Have a prompt computed. Returns parameters for the server that decodes; None if that has to compute it."""
    prompt = {name: value for name, value in asked.items() if name not in GENERATES}
    prompt |= {"max_tokens": 1, "stream": False, "kv_transfer_params": PREFILL}
    for url in servers.in_turn():
        servers.requests[url] += 1
        try:
            response = await client.post(url + path, json=prompt, headers=headers)
            return response.json().get("kv_transfer_params") if response.is_success else None
        except (httpx.ConnectError, httpx.ConnectTimeout):
            servers.failed(url)
        except (httpx.HTTPError, ValueError, AttributeError):  # the last one anyio raises while a server is killed
            return None
        finally:
            servers.requests[url] -= 1
    return None


async def decode(client: httpx.AsyncClient, servers: Servers, path: str, asked: dict, headers: dict) -> Response:
    """The answer of the first server that accepts the connection."""
    why = "no server decodes"
    for url in servers.in_turn():
        sent = client.build_request("POST", url + path, json=asked, headers=headers)
        servers.requests[url] += 1
        try:
            response = await client.send(sent, stream=True)
        except httpx.HTTPError as error:
            servers.requests[url] -= 1
            servers.failed(url)
            why = f"{url}: {error!r}"
            if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
                continue
            break
        passed = {"content-type": response.headers.get("content-type", "application/json")}
        return StreamingResponse(body(servers, url, response), response.status_code, passed)
    return JSONResponse({"error": {"message": why, "code": 502}}, 502)


async def body(servers: Servers, url: str, response: httpx.Response) -> AsyncIterator[bytes]:
    """What a server answers, until its end or that of the client."""
    try:
        async for piece in response.aiter_bytes():
            yield piece
    finally:
        servers.requests[url] -= 1
        await response.aclose()


def proxy(prefillers: Sequence[str], decoders: Sequence[str]) -> FastAPI:
    """Between clients and the servers at these URLs."""
    first, second = Servers(prefillers), Servers(decoders)

    @contextlib.asynccontextmanager
    async def connected(app: FastAPI) -> AsyncIterator[None]:
        # A connection for each request: servers close idle ones, perhaps just when one is used again.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        async with httpx.AsyncClient(timeout=TIMEOUT, limits=limits, trust_env=False) as app.state.client:
            yield

    app = FastAPI(lifespan=connected)

    @app.post("/v1/completions")
    @app.post("/v1/chat/completions")
    async def complete(request: Request) -> Response:
        client, headers, path = request.app.state.client, forwarded(request), request.url.path
        asked = await request.json()
        params = await prefill(client, first, path, asked, headers)
        return await decode(client, second, path, {**asked, "kv_transfer_params": params}, headers)

    @app.get("/health")
    async def health(request: Request) -> Response:
        """Does a server decode?"""

        async def answers(url: str) -> bool:
            with contextlib.suppress(httpx.HTTPError):
                return (await request.app.state.client.get(f"{url}/health", timeout=TIMEOUT.connect)).is_success
            return False

        return Response(status_code=200 if any(await asyncio.gather(*map(answers, second.urls))) else 503)

    return app


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for kind, what in (("prefill", "computes prompts"), ("decode", "decodes")):
        what = f"of a server that {what}; may be repeated"
        parser.add_argument(f"--{kind}", action="append", required=True, metavar="URL", help=what)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    asked = parser.parse_args()
    uvicorn.run(proxy(asked.prefill, asked.decode), host=asked.host, port=asked.port, log_level="warning")


if __name__ == "__main__":
    main()
