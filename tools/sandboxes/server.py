"""A service that judges programs for other machines, isolated by bubblewrap on this one.

HTTP over TLS, for clients that send the token of `sandbox.secret` (basic authentication):

    POST /verdict    {"program", "kind", "tests", "limits"} -> {"outcome", "reason"}
    POST /run_code   SandboxFusion's, for Python without files

`num_programs` programs run at a time; further requests queue, first come, first served, and their
bodies are read only when it is their turn.
"""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import hmac
import json
import math
import os
import re
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Literal

import uvicorn
from pydantic import BaseModel, Field, ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from gapo_megatron.errors import printable, shown
from gapo_megatron.rewards.code import TESTS, run_tests
from gapo_megatron.rewards.sandbox import Limits, ProgramError, SandboxError, start_sandbox
from gapo_megatron.rewards.sandbox.remote import QUEUE_TIMEOUT_S
from gapo_megatron.rewards.sandbox.secret import USER, read_secret
from gapo_tools.sandboxes.connections import Strangers, protocol_of

BODY_TIMEOUT_S = 60.0
"""Most time between two parts of a request, once it has a place."""

MAX_REQUEST_BYTES = 2**30
"""A program with all its tests."""

_EXIT = re.compile(r"(ended with exit code|was killed by signal) (\d+)")


class Server:
    """Listens once it is created; `serve` answers clients."""

    def __init__(
        self, *, host: str, port: int, python: str, num_programs: int, largest: Limits
    ) -> None:
        """Bind the address.

        Args:
            host: address of the interface to listen on.
            port: 0 for any free port; see `port`.
            python: interpreter of the programs.
            num_programs: number of programs at a time.
            largest: largest limits that a client may request.

        Raises:
            OSError: the address cannot be bound.
            SandboxError: see `read_secret`.
        """
        secret = read_secret()
        login = base64.b64encode(f"{USER}:{secret.token}".encode())
        self._login = b"Basic " + login
        self._python, self._largest = python, largest
        self._box = {"sandbox": "bubblewrap", "python": python}
        [(family, *_), *_] = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        self._socket = socket.create_server((host, port), family=family, backlog=1024)
        self.port: int = self._socket.getsockname()[1]
        # The kernel ends a sandbox with its thread, so threads are kept.
        self._threads = ThreadPoolExecutor(num_programs, thread_name_prefix="program")
        self._places = asyncio.Semaphore(num_programs)
        self._strangers = Strangers("the sandbox service without its token")
        work = {"/verdict": self._judge, "/run_code": self._run_code}
        routes = [
            Route(path, partial(self._answer, one), methods=["POST"]) for path, one in work.items()
        ]
        self.server = uvicorn.Server(
            uvicorn.Config(
                Starlette(routes=routes),
                ssl_certfile=secret.path,
                http=protocol_of(self._strangers),
                log_config=None,
                log_level="error",  # a stranger can cause any number of warnings
                access_log=False,
                lifespan="off",
                loop="asyncio",
                ws="none",
                proxy_headers=False,  # who connects is who `Strangers` knows
            )
        )

    def serve(self) -> None:
        """Answer clients until `server.should_exit`; in the main thread, until a signal."""

        async def serve() -> None:
            asyncio.get_running_loop().set_exception_handler(self._strangers.on_error)
            await self.server.serve(sockets=[self._socket])

        asyncio.run(serve())

    async def _answer(self, work: Callable[[bytearray, int], Any], request: Request) -> Response:
        """Answer a request with what `work` makes of its body, in a thread of its own."""
        if not hmac.compare_digest(request.headers.get("authorization", "").encode(), self._login):
            headers = {"www-authenticate": f'Basic realm="{USER}"'}
            raise HTTPException(401, "the token differs from this service's", headers)
        self._strangers.discard(request.scope["client"])
        try:
            await asyncio.wait_for(self._places.acquire(), QUEUE_TIMEOUT_S)
        except TimeoutError:
            reason = f"no place for {QUEUE_TIMEOUT_S:g} s: raise --num-programs, or start another"
            raise HTTPException(503, reason) from None
        try:
            body = await _read(request)
            answer = await self._run(partial(work, body), request)
        except (ClientDisconnect, TimeoutError):
            raise HTTPException(408, "the request did not arrive") from None
        finally:
            self._places.release()
        return Response(json.dumps(answer), media_type="application/json")

    async def _run(self, work: Callable[[int], Any], request: Request) -> Any:
        """Run `work` in a thread; its sandboxes end when the client has gone."""
        hangup = os.eventfd(0)
        gone = asyncio.ensure_future(_await_end(request))
        try:
            loop = asyncio.get_running_loop()
            done = loop.run_in_executor(self._threads, work, hangup)
            await asyncio.wait({done, gone}, return_when=asyncio.FIRST_COMPLETED)
            os.eventfd_write(hangup, 1)
            return await done
        finally:
            gone.cancel()
            os.close(hangup)

    def _judge(self, body: bytearray, hangup: int) -> dict[str, str]:
        try:
            asked = json.loads(body)
            program, tests = asked["program"], TESTS[asked["kind"]](**asked["tests"])
            limits = self._limits(asked["limits"])
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            what = f"{type(error).__name__}: {printable(str(error))}"
            raise HTTPException(422, f"a request of another version: {what}") from None
        verdict = run_tests(program, tests, limits=limits, hangup=hangup, **self._box)
        return {"outcome": verdict.outcome, "reason": verdict.reason}

    def _run_code(self, body: bytearray, hangup: int) -> dict[str, Any]:
        try:
            asked = _RunCode.model_validate_json(body)
        except ValidationError as error:
            raise HTTPException(422, _explain(error)) from None
        seconds = math.ceil(asked.run_timeout)
        limits = {"cpu_s": seconds, "wall_s": seconds, "total_s": seconds}
        if asked.memory_limit_MB > 0:
            limits["memory_mib"] = asked.memory_limit_MB
        answer: dict[str, Any] = {
            "message": "",
            "compile_result": None,
            "executor_pod_name": None,
            "files": {},
        }
        try:
            with start_sandbox(self._limits(limits), hangup=hangup, **self._box) as box:
                box.send({"program": asked.code, "prelude": ""})
                start = time.monotonic()
                try:
                    reply = box.ask({"stdin": asked.stdin or ""})
                except ProgramError as error:
                    reply = {"stdout": "", "stderr": "", "failure": str(error)}
        except SandboxError as error:
            return answer | {"status": "SandboxError", "message": str(error), "run_result": None}
        result = {**_result(reply), "execution_time": time.monotonic() - start}
        status = "Success" if result["return_code"] == 0 else "Failed"
        return answer | {"status": status, "run_result": result}

    def _limits(self, asked: dict[str, Any]) -> Limits:
        """Check limits of a client. HTTPException: names the limit, its value and the rule."""
        largest = dataclasses.asdict(self._largest)
        for name, value in asked.items():
            if name not in largest:
                raise HTTPException(422, f"{printable(name)} is no limit of this service")
            if type(value) is not int or value < 1:
                raise HTTPException(
                    422, f"{name} ({shown(value)}) must be a whole number, at least 1"
                )
            if value > largest[name]:
                cure = ": lower reward.timeout_s, or raise --max-total-s of the service"
                raise HTTPException(
                    422,
                    f"{name} ({value!s:.40}) is more than this service allows ({largest[name]})"
                    + (cure if name.endswith("_s") else ""),
                )
        return Limits(**asked)


class _RunCode(BaseModel):
    """Body of SandboxFusion's /run_code; what this service cannot do is refused."""

    code: str
    language: Literal["python"]
    stdin: str | None = None
    run_timeout: float = Field(10, gt=0, allow_inf_nan=False)
    compile_timeout: float = 10
    memory_limit_MB: int = -1
    files: dict[str, str | None] = Field({}, max_length=0)
    fetch_files: list[str] = Field([], max_length=0)


def _explain(error: ValidationError) -> str:
    faults = (
        f"{'.'.join(map(str, one['loc']))} ({shown(one['input'])}): {one['msg']}"
        for one in error.errors()
    )
    return printable("; ".join(faults))


def _result(reply: dict[str, Any]) -> dict[str, Any]:
    """SandboxFusion's run_result for a reply of the sandbox, without the time."""
    failure, stderr = reply["failure"], reply["stderr"]
    status, ended = "Finished", _EXIT.match(failure)
    code: int | None = 0
    if failure.startswith("took "):
        status, code = "TimeLimitExceeded", None
    elif ended:
        code = int(ended[2]) if ended[1].startswith("ended") else -int(ended[2])
    elif failure:  # a limit: killed from outside, which it cannot say itself
        code, stderr = -9, f"{stderr}\n{failure}\n"
    return {"status": status, "return_code": code, "stdout": reply["stdout"], "stderr": stderr}


async def _read(request: Request) -> bytearray:
    body, parts = bytearray(), request.stream()
    while (part := await asyncio.wait_for(anext(parts, None), BODY_TIMEOUT_S)) is not None:
        body += part
        if len(body) > MAX_REQUEST_BYTES:
            raise HTTPException(413, f"the request has more than {MAX_REQUEST_BYTES} bytes")
    return body


async def _await_end(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


__all__ = ["Server"]
