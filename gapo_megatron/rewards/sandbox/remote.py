"""Programs on other machines, run by tools/serve_sandboxes.py there or by a SandboxFusion.

Both speak SandboxFusion's `POST /run_code`. A service that is down, busy for too long or answers
badly raises SandboxError, so that the verdict is unknown.
"""

from __future__ import annotations

import functools
import json
import secrets
import socket
import ssl
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from gapo_megatron.errors import printable, shown
from gapo_megatron.isolation import split_setting
from gapo_megatron.rewards.sandbox.base import (
    START_TIMEOUT_S,
    Limits,
    ProgramError,
    Sandbox,
    SandboxError,
)
from gapo_megatron.rewards.sandbox.secret import SECRET_PATH, USER, Secret, read_secret

if TYPE_CHECKING:
    import httpx

CONNECT_TIMEOUT_S = 20.0
"""Time for a connection, three times; a refused one is tried again within a second."""

QUEUE_TIMEOUT_S = 600.0
"""Time to wait in the service's queue."""

MAX_ANSWER_BYTES = 64 * 2**20

MAX_OUTPUT_BYTES = 100_000
"""SandboxFusion reads 128 KiB until a program ends: one that prints more waits for ever."""

_BUSY = (408, 429, 502, 503, 504)
_RETRY_S = (1.0, 3.0, 9.0)
"""Seconds to wait before a request that got one of `_BUSY` is sent again."""

_KEEP_ALIVE = [
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 30),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
]
"""A machine that has vanished is noticed after a minute, however long the answer may take."""

_START = """
import json, sys, types
for name, text in json.loads({modules}):
    module = sys.modules[name] = types.ModuleType(name)
    exec(compile(text, name, "exec"), module.__dict__)
module.main(*json.loads({arguments}))
"""
_INSIDE = ("channel", "values", "program", "alone")
"""Modules of `inside` that `_START` needs; each imports only those before it."""


def post(sandbox: str, path: str, body: dict[str, Any], *, timeout_s: float) -> Any:
    """Send a request, again if the service is busy; return its JSON answer.

    Args:
        sandbox: `reward.sandbox`, of a kind in `REMOTE`.
        path: below its URL.
        body: JSON object.
        timeout_s: most time for the answer, once the request is sent; without the queue.

    Raises:
        SandboxError: no answer, or one that cannot be used; names the service and the reason.
    """
    import httpx

    kind, url = split_setting(sandbox)
    client = _client(read_secret() if kind == "service" else None)
    service = f"the sandbox service at {url}"
    limits = httpx.Timeout(timeout_s + QUEUE_TIMEOUT_S, connect=CONNECT_TIMEOUT_S)
    content, end = json.dumps(body).encode(), time.monotonic() + QUEUE_TIMEOUT_S
    for wait_s in (*_RETRY_S, None):
        try:
            with client.stream("POST", url + path, content=content, timeout=limits) as response:
                answer = _read(response)
        except httpx.ConnectError as error:
            reason = f"{service} cannot be reached: {error}"
            if "CERTIFICATE_VERIFY_FAILED" in str(error) and kind == "service":
                reason = (
                    f"{service} could not be authenticated with the certificate of this machine "
                    f"({SECRET_PATH}): another program listens there, or it has another file"
                )
            raise SandboxError(reason) from None
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            what = "timed out" if isinstance(error, httpx.TimeoutException) else str(error)
            raise SandboxError(f"the connection to {service} was lost: {what}") from None
        if response.status_code not in _BUSY or wait_s is None or time.monotonic() > end:
            break
        time.sleep(wait_s)
    if response.status_code != 200:
        reason = printable(answer.decode(errors="replace"), most=300)
        raise SandboxError(f"{service} refuses (HTTP status {response.status_code}): {reason}")
    try:
        return json.loads(answer)
    except (ValueError, RecursionError):
        raise SandboxError(f"{service} answered {shown(answer[:40])}, which is not JSON") from None


@functools.lru_cache(maxsize=8)
def _client(secret: Secret | None) -> httpx.Client:
    """A client for a service of ours, which alone it trusts; None: for others."""
    import httpx

    try:
        context = ssl.create_default_context(cafile=secret.path if secret else None)
    except ssl.SSLError as error:
        raise SandboxError(f"{SECRET_PATH} is damaged: {error}; copy it again") from None
    context.check_hostname = not secret  # a service of ours has many names, and one certificate
    transport = httpx.HTTPTransport(
        verify=context,
        retries=2,  # of connections alone
        socket_options=_KEEP_ALIVE,
        # Never a connection that the service may have closed meanwhile.
        limits=httpx.Limits(max_keepalive_connections=0),
    )
    auth = (USER, secret.token) if secret else None
    return httpx.Client(transport=transport, auth=auth, trust_env=False)


def _read(response: httpx.Response) -> bytes:
    answer = bytearray()
    for part in response.iter_bytes():
        answer += part
        if len(answer) > MAX_ANSWER_BYTES:
            raise SandboxError(
                f"the sandbox service at {response.url} answered with more than "
                f"{MAX_ANSWER_BYTES} bytes"
            )
    return bytes(answer)


class Run(NamedTuple):
    """A run of a program by `/run_code`."""

    stdout: str
    stderr: str
    failure: str
    """How the program failed; empty if it did not."""
    seconds: float


def run_code(sandbox: str, code: str, *, stdin: str, run_timeout: float, memory_mib: int) -> Run:
    """Run a Python program by SandboxFusion's API.

    Raises:
        SandboxError: see `post`; or the service says that it failed itself.
    """
    body = {
        "code": code,
        "language": "python",
        "stdin": stdin,
        "run_timeout": run_timeout,
        "memory_limit_MB": memory_mib,
    }
    answer = post(sandbox, "/run_code", body, timeout_s=run_timeout + START_TIMEOUT_S)
    service = f"the sandbox service at {split_setting(sandbox)[1]}"
    if not isinstance(answer, dict) or answer.get("status") not in ("Success", "Failed"):
        reason = answer.get("message") if isinstance(answer, dict) else answer
        raise SandboxError(f"{service} failed: {printable(str(reason), most=300)}")
    result = answer.get("run_result")
    fields: dict[str, Any] = result if isinstance(result, dict) else {}
    status, code_or_none = fields.get("status"), fields.get("return_code")
    stdout, stderr = fields.get("stdout") or "", fields.get("stderr") or ""
    seconds = fields.get("execution_time") or 0.0
    late = status == "TimeLimitExceeded"
    known = late or (status == "Finished" and type(code_or_none) is int)
    texts = isinstance(stdout, str) and isinstance(stderr, str)
    if not known or not texts or type(seconds) not in (int, float):
        raise SandboxError(
            f"{service} answered with run_result {printable(shown(result), most=300)}"
        )
    failure = f"took longer than {run_timeout:g} s" if late else ""
    if code_or_none:
        last = next((line for line in reversed(stderr.split("\n")) if line.strip()), "")
        how = "ended with exit code" if code_or_none > 0 else "was killed by signal"
        failure = f"{how} {abs(code_or_none)}" + (f": {last.strip()[:500]}" if last else "")
    return Run(stdout, stderr, failure, seconds)


class RemoteSandbox(Sandbox):
    """Answers messages by `/run_code`: a run of the program for each.

    Beside those that any sandbox answers (`inside`): {"check": ...} runs the asserts in the process
    of the program -> {"failure": TEXT}.
    """

    def __init__(self, limits: Limits, *, sandbox: str) -> None:
        """Prepare; every message but the program itself is a request.

        Args:
            limits: of these, the service gets the memory and the time.
            sandbox: see `post`.
        """
        self._limits, self._sandbox = limits, sandbox
        self._is_ours = split_setting(sandbox)[0] == "service"
        self._left_s: float = limits.total_s
        self._program: dict[str, str] = {}
        self._reply = b""

    def write_line(self, line: bytes) -> None:
        message = json.loads(line)
        if "program" in message:
            self._program = message
        elif "calls" not in message:
            self._reply = self._run(message)

    def read_line(self) -> bytes:
        return self._reply

    def close(self) -> None:
        pass

    def _run(self, message: dict[str, Any]) -> bytes:
        mark, most_s = secrets.token_hex(16), self._left_s
        # A service of ours refuses more time than it allows: it has to see all of it.
        if not self._is_ours and "check" not in message:
            most_s = min(most_s, self._limits.wall_s)
        if most_s <= 0:
            raise ProgramError(f"took longer than {self._limits.total_s} s")
        stdin = message.get("stdin", "")
        arguments = [self._program, message | ({"stdin": ""} if stdin else {}), mark]
        run = run_code(
            self._sandbox,
            # ASCII: services write it to a file in any encoding.
            _START.format(modules=ascii(_modules()), arguments=ascii(json.dumps(arguments))),
            stdin=stdin,
            run_timeout=max(most_s, 1.0),
            memory_mib=self._limits.memory_mib,
        )
        self._left_s -= run.seconds
        # A line of its own: a traceback shows the mark as an argument.
        # One byte that is no UTF-8 makes SandboxFusion replace all of it.
        has_started = mark in run.stderr.split("\n") or run.stderr.startswith("[DecodeError]")
        if not self._is_ours and not has_started:
            raise SandboxError(
                f"the sandbox service at {split_setting(self._sandbox)[1]} did not start the "
                f"program: {printable(run.failure or 'no reason given', most=300)}"
            )
        failure = run.failure.replace(f": {mark}", "")
        if "stdin" in message:
            return json.dumps({"stdout": run.stdout, "failure": failure}).encode()
        if "function" in message and not failure:
            return run.stdout.encode(errors="replace")
        if run.stdout != mark:
            failure = failure or "ended the asserts"
        return json.dumps({"failure": failure, "error": failure}).encode()


@functools.cache
def _modules() -> str:
    folder = Path(__file__).parent / "inside"
    package = "gapo_megatron.rewards.sandbox.inside"
    return json.dumps([(f"{package}.{one}", (folder / f"{one}.py").read_text()) for one in _INSIDE])


__all__ = ["MAX_OUTPUT_BYTES", "QUEUE_TIMEOUT_S", "RemoteSandbox", "post", "run_code"]
