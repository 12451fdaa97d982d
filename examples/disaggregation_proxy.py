"""A proxy in front of two vLLM servers: one computes the prompts, the other decodes behind them.

    python examples/disaggregation_proxy.py --prefill http://127.0.0.1:8001 --decode http://127.0.0.1:8002 --port 8000

Both servers run kvtier with a tier that they share (docs/disaggregation.md). The `kv_transfer_params` are those
of vLLM's NIXL connector. A prompt that the first server could not compute is computed by the second.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import httpx
import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.background import BackgroundTask

#: For the server that computes the prompt.
PREFILL = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
#: Seconds to connect, and seconds without a byte.
TIMEOUT = httpx.Timeout(600, connect=5)


def forwarded(request: Request) -> dict[str, str]:
    """The headers of a client that a server is to see."""
    return {name: request.headers[name] for name in ("authorization", "x-request-id") if name in request.headers}


async def prefill(client: httpx.AsyncClient, url: str, asked: dict[str, Any], headers: dict[str, str]) -> dict | None:
    """Have a prompt computed. Returns parameters for the server that decodes; None if that has to compute it."""
    prompt = {name: value for name, value in asked.items() if name not in ("stream_options", "min_tokens")}
    prompt |= {"max_tokens": 1, "stream": False, "kv_transfer_params": PREFILL}
    try:
        response = await client.post(url, json=prompt, headers=headers)
        return response.json().get("kv_transfer_params") if response.is_success else None
    except (httpx.HTTPError, ValueError, AttributeError):  # the last one anyio raises while a server is killed
        return None


def proxy(prefiller: str, decoder: str) -> FastAPI:
    """Between clients and the servers at these two URLs."""

    @contextlib.asynccontextmanager
    async def connected(app: FastAPI) -> AsyncIterator[None]:
        # A connection for each request: servers close idle ones, perhaps just when one is used again.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        async with httpx.AsyncClient(timeout=TIMEOUT, limits=limits, trust_env=False) as app.state.client:
            yield

    app = FastAPI(lifespan=connected)

    @app.post("/v1/completions")
    async def complete(request: Request) -> Response:
        client, headers = request.app.state.client, forwarded(request)
        asked = await request.json()
        params = await prefill(client, f"{prefiller}/v1/completions", asked, headers)
        asked = {**asked, "kv_transfer_params": params}
        sent = client.build_request("POST", f"{decoder}/v1/completions", json=asked, headers=headers)
        try:
            response = await client.send(sent, stream=True)
        except httpx.HTTPError as error:
            return JSONResponse({"error": {"message": f"{decoder}: {error!r}", "code": 502}}, 502)
        passed = {"content-type": response.headers.get("content-type", "application/json")}
        closed = BackgroundTask(response.aclose)
        return StreamingResponse(response.aiter_bytes(), response.status_code, passed, background=closed)

    @app.get("/health")
    async def health() -> Response:
        return Response()

    return app


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prefill", required=True, metavar="URL", help="of the server that computes prompts")
    parser.add_argument("--decode", required=True, metavar="URL", help="of the server that decodes")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    asked = parser.parse_args()
    uvicorn.run(proxy(asked.prefill, asked.decode), host=asked.host, port=asked.port, log_level="warning")


if __name__ == "__main__":
    main()
