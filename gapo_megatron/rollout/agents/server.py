"""The address that agents ask: a few routes of OpenAI's API on the loopback interface."""

from __future__ import annotations

import asyncio
import hmac
import json
import resource
import secrets
import socket
import threading
from typing import TYPE_CHECKING, Any

from gapo_megatron.io.documents import sendable
from gapo_megatron.rollout.agents import responses
from gapo_megatron.rollout.agents.errors import RefusedError
from gapo_megatron.rollout.agents.live import LiveAgent
from gapo_megatron.rollout.agents.requests import MODEL, stream_of

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

_MOST_BYTES = 16 * 2**20
"""Largest request."""
_KEEP_ALIVE_S = 600
"""How long a connection may be idle: an agent's tools take their time."""
_MOST_FILES = 65_536
"""Open files that this process may have; programs that it starts close each possible one."""


class Server:
    """Serves the sessions of this process, each with a secret of its own, in a thread.

    Attributes:
        base_url: the address, for clients.
    """

    def __init__(self) -> None:
        """Listen on a port that the system chooses, and start the thread."""
        self._sessions: dict[str, tuple[str, LiveAgent]] = {}
        """Secret and agent, by the number in the secret."""
        self._num_sessions = 0
        self._lock = threading.Lock()
        self._socket = socket.create_server(("127.0.0.1", 0), backlog=1024)
        self.base_url = f"http://127.0.0.1:{self._socket.getsockname()[1]}/v1"
        now, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        if 0 <= now < _MOST_FILES:  # a session takes two
            wanted = _MOST_FILES if most == resource.RLIM_INFINITY else min(most, _MOST_FILES)
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))
        threading.Thread(target=self._serve, name="agents' server", daemon=True).start()

    def new_secret(self) -> str:
        """A secret for a session."""
        with self._lock:
            self._num_sessions += 1
            return f"{self._num_sessions}-{secrets.token_urlsafe(32)}"

    def add(self, agent: LiveAgent) -> None:
        """Serve an agent, by its session's secret."""
        secret = agent.session.api_key
        self._sessions[secret.partition("-")[0]] = secret, agent

    def remove(self, agent: LiveAgent) -> None:
        """Serve an agent no more: its secret is unknown from now on."""
        self._sessions.pop(agent.session.api_key.partition("-")[0], None)

    def _serve(self) -> None:
        import uvicorn

        config = uvicorn.Config(
            self._app(),
            log_config=None,
            log_level="error",
            access_log=False,
            lifespan="off",
            loop="asyncio",
            http="h11",
            ws="none",
            timeout_keep_alive=_KEEP_ALIVE_S,
        )
        asyncio.run(uvicorn.Server(config).serve(sockets=[self._socket]))

    def _app(self) -> Any:
        from starlette.applications import Starlette
        from starlette.routing import Route

        return Starlette(
            routes=[
                Route("/v1/chat/completions", self._complete, methods=["POST"]),
                Route("/v1/responses", self._respond, methods=["POST"]),
                Route("/v1/models", self._models),
            ],
            exception_handlers={RefusedError: _refuse, 404: _not_found, 405: _not_found},
        )

    async def _complete(self, request: Request) -> Response:
        return await self._answer(request, is_response=False)

    async def _respond(self, request: Request) -> Response:
        return await self._answer(request, is_response=True)

    async def _answer(self, request: Request, *, is_response: bool) -> Response:
        from starlette.responses import JSONResponse, Response

        agent = self._find(request)
        try:
            body = sendable(json.loads(await _read(request)))  # no tokenizer takes half characters
        except (ValueError, RecursionError) as error:
            raise RefusedError(f"the request must be JSON: {error}") from None
        is_repeated = request.headers.get("x-stainless-retry-count", "0") != "0"
        answer = await asyncio.wrap_future(
            agent.post(body, is_repeated=is_repeated, is_response=is_response)
        )
        events = responses.stream_of(body, answer) if is_response else stream_of(body, answer)
        if events is not None:
            return Response(events, media_type="text/event-stream")
        return JSONResponse(answer)

    async def _models(self, request: Request) -> Response:
        from starlette.responses import JSONResponse

        self._find(request)
        model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "gapo_megatron"}
        return JSONResponse({"object": "list", "data": [model]})

    def _find(self, request: Request) -> LiveAgent:
        """The agent whose secret the request has. RefusedError: there is none.

        The secret is the bearer token, or in the header X-API-Key, which goes before it.
        """
        scheme, _, secret = request.headers.get("authorization", "").partition(" ")
        if "x-api-key" in request.headers:
            scheme, secret = "bearer", request.headers["x-api-key"]
        ours, agent = self._sessions.get(secret.partition("-")[0], ("", None))
        is_equal = hmac.compare_digest(secret.encode(), ours.encode())
        if scheme.lower() != "bearer" or not is_equal or agent is None:
            raise RefusedError(
                "no session has this key: it is wrong, or the session's episode has ended",
                status=401,
            )
        return agent


async def _read(request: Request) -> bytes:
    """The body of a request. RefusedError: it is too large."""
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > _MOST_BYTES:
            raise RefusedError(f"the request has more than {_MOST_BYTES} bytes", status=413)
    return bytes(body)


async def _refuse(request: Request, error: Any) -> Response:
    """An error as the API writes it, which the client does not try again."""
    from starlette.responses import JSONResponse

    content = {
        "message": str(error),
        "type": "invalid_request_error",
        "param": error.param,
        "code": None,
    }
    headers = {"x-should-retry": "false"}
    return JSONResponse({"error": content}, status_code=error.status, headers=headers)


async def _not_found(request: Request, error: Any) -> Response:
    what = f"{request.method} {request.url.path} is not served here, only completions and responses"
    return await _refuse(request, RefusedError(what, status=error.status_code))
