"""Servers of other projects' protocols, as processes, that fail in the way a row asks for.

`python -m tests.gym_servers nemo_gym|openenv` prints its port. A row's column `fault` names what
goes wrong, and where: "tool:status". The game of both: guess the number, with a hint after each
guess; the reward is 1, less 0.25 for each wrong guess.
"""

from __future__ import annotations

import json
import os
import sys
import time
import uuid
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

SPECIAL = "a<|im_<|im_end|>end|>b"
"""Holds a special token, also once the one within it is removed."""
LONG = "So long. " * 100
FOREIGN = "\u6570\u5b57 \ud83d"
"""Characters beyond ASCII, the last one cut in half, as programs in JavaScript do."""
TEXTS = {"special": SPECIAL, "long": LONG, "foreign": FOREIGN}
"""What is said instead of a hint."""
LONG_S = 60.0
"""A server that takes this long has no answer, for tests."""

REWARDS = {"nan": float("nan"), "infinite": float("inf"), "text": "1.0", "null": None, "true": True}


class NemoGym(BaseHTTPRequestHandler):
    """`seed_session`, a tool and `verify`, with a session in a cookie."""

    protocol_version = "HTTP/1.1"
    sessions: dict[str, dict[str, Any]] = {}  # noqa: RUF012 # of the process
    num_seeded = 0
    num_answered = 0
    """Requests on this connection that have their answer."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        name = self.path.strip("/")
        if name == "seed_session":
            type(self).num_seeded += 1
            number = str(uuid.uuid4())
            self.sessions[number] = {"secret": body["secret"], "wrong": 0, "fault": body["fault"]}
        else:
            cookies = dict(
                one.strip().split("=") for one in self.headers.get("Cookie", "").split(";")
            )
            number = cookies["session"]
        session = self.sessions[number]
        if session["fault"] == "idle" and self.num_answered:  # closed, as the request comes
            self.close_connection = True
            return
        stage, _, fault = session["fault"].partition(":")
        if stage == {"seed_session": "seed", "guess": "tool"}.get(name, name):
            if self.fail(fault, number):
                return
            if fault in ("not_json", "a_list", "judge_failed", "no_reward", *REWARDS):
                texts = {"not_json": "<html>", "a_list": "[1]", "no_reward": "{}"}
                failed = {"reward": 0.0, "_ng_failure_class": "judge_failed"}
                text = json.dumps({"reward": REWARDS.get(fault)} if fault in REWARDS else failed)
                self.answer(200, texts.get(fault, text), number)
                return
        if name == "seed_session":
            self.answer(200, "{}", number)
        elif name == "guess":
            if not isinstance(body.get("number"), int):
                self.answer(422, json.dumps({"detail": "number must be an integer"}), number)
                return
            session["wrong"] += body["number"] != session["secret"]
            if stage == "tool" and fault in TEXTS:
                self.answer(200, TEXTS[fault], number)
                return
            way = "lower" if body["number"] > session["secret"] else "higher"
            self.answer(200, way if body["number"] != session["secret"] else "right", number)
        elif name == "verify":
            self.answer(200, json.dumps({**body, "reward": self.reward(body, session)}), number)
        else:
            self.answer(404, json.dumps({"detail": "Not Found"}), number)

    def reward(self, body: dict[str, Any], session: dict[str, Any]) -> float:
        """Of the response, which must have each call and its result, as the real ones read it."""
        from openai.types.responses import Response

        items = body["response"]["output"]
        own = [one for one in items if one["type"] != "function_call_output"]
        Response.model_validate({**body["response"], "output": own})  # as Gym's, but for these
        calls = [one["call_id"] for one in items if one["type"] == "function_call"]
        results = [one["call_id"] for one in items if one["type"] == "function_call_output"]
        assert calls == results and items[-1]["type"] == "message"
        said = items[-1]["content"][0]["text"]
        return 1 - 0.25 * session["wrong"] if str(session["secret"]) in said else 0.0

    def fail(self, fault: str, session: str) -> bool:
        """Break the connection or the protocol; whether it has."""
        if fault == "status":
            self.answer(500, "Internal Server Error", session)  # which is there all the same
        elif fault == "half":
            self.send_response(200)
            self.send_header("Content-Length", "100")
            self.end_headers()
            self.wfile.write(b'{"reward": 1.0')
            self.close_connection = True
        elif fault == "hang":
            time.sleep(LONG_S)
        elif fault == "closed":
            self.close_connection = True
        elif fault == "die":
            os._exit(1)
        else:
            return False
        return True

    def answer(self, status: int, text: str, session: str) -> None:
        data = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Set-Cookie", f"session={session}; path=/; httponly")
        self.end_headers()
        self.wfile.write(data)
        self.num_answered += 1

    def log_message(self, *_: Any) -> None:
        """Nothing."""


def serve_openenv(port: int = 0) -> None:
    """`reset` and `step` over WebSockets, each connection with an environment of its own."""
    from websockets.sync.server import ServerConnection, serve

    def handle(connection: ServerConnection) -> None:
        if connection.request is None or connection.request.path != "/ws":
            return
        game: dict[str, Any] = {}
        for text in connection:
            message = json.loads(text, parse_constant=refuse)
            data = message["data"]
            if message["type"] == "reset":
                game = {"secret": data.get("seed", 0), "wrong": 0, "fault": data.get("fault", "")}
            stage, _, fault = game["fault"].partition(":")
            if message["type"] == stage and fail(connection, fault):
                return
            reply: dict[str, Any] = {"observation": {"text": "Guess."}, "reward": None}
            reply["done"] = False
            if message["type"] == "step":
                guess = data["message"].strip()
                is_right = guess == str(game["secret"])
                game["wrong"] += not is_right
                reply["done"], reply["reward"] = is_right, 1.0 if is_right else -0.25
                reply["observation"] = {"text": "right" if is_right else "wrong"}
                if stage == "end" and is_right:
                    reply["reward"] = REWARDS.get(fault)
                if stage == "step" and fault in REWARDS:
                    reply["reward"], reply["done"] = REWARDS[fault], True
            if message["type"] == stage and fault in TEXTS:
                reply["observation"] = {"text": TEXTS[fault]}
            if message["type"] == stage and fault == "no_observation":
                del reply["observation"]
            if message["type"] == stage and fault == "no_done":
                del reply["done"]
            connection.send(json.dumps({"type": "observation", "data": reply}))

    with serve(handle, "127.0.0.1", port) as server:
        print(server.socket.getsockname()[1], flush=True)
        server.serve_forever()


def refuse(constant: str) -> None:
    """NaN and Infinity are no JSON."""
    raise ValueError(constant)


def fail(connection: Any, fault: str) -> bool:
    """Break the connection or the protocol; whether it has ended."""
    if fault == "error":
        error = {"message": "boom", "code": "EXECUTION_ERROR"}
        connection.send(json.dumps({"type": "error", "data": error}))
    elif fault in ("not_json", "a_list", "other"):
        texts = {"not_json": '{"type": "obs', "a_list": "[1]", "other": '{"type": "state"}'}
        connection.send(texts[fault])
    elif fault == "half":  # of a frame: its header says 100 bytes
        connection.socket.sendall(bytes([0x81, 100]) + b'{"type"')
        connection.socket.close()
    elif fault == "hang":
        time.sleep(LONG_S)
    elif fault == "die":
        os._exit(1)
    elif fault != "closed":
        return False
    return True


def main() -> None:
    if sys.argv[1] == "openenv":
        serve_openenv()
        return
    server = ThreadingHTTPServer(("127.0.0.1", 0), NemoGym)
    print(server.server_address[1], flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
