"""A small environment of the package `verifiers`, for tests: its tasks are products to compute."""

from __future__ import annotations

import importlib
import json
import uuid
from pathlib import Path
from typing import Any

import pytest

MODULE = '''
"""A taskset, and a harness that talks in this process: no network, no container."""

import asyncio, json
import openai
import verifiers.v1 as vf
from verifiers.v1.dialects.chat import message_to_wire


class ProductData(vf.TaskData):
    answer: str
    again: str = "Are you sure?"


class ProductTaskConfig(vf.TaskConfig):
    fails: str = ""
    log: str = ""


class ProductTask(vf.Task[ProductData, vf.State, ProductTaskConfig]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        if self.config.fails == "reward":
            raise ZeroDivisionError("no such reward")
        if self.config.fails == "time":
            await asyncio.sleep(60)
        if self.config.log:
            with open(self.config.log, "a") as file:
                counts = [trace.num_output_tokens, trace.num_total_tokens, trace.num_turns]
                file.write(json.dumps([self.data.idx, *counts, trace.last_reply]) + "\\n")
        return float(self.data.answer in trace.last_reply)


class ProductConfig(vf.TasksetConfig):
    num_tasks: int = 4
    path: str = ""
    task: ProductTaskConfig = ProductTaskConfig()


class ProductTaskset(vf.Taskset[ProductTask, ProductConfig]):
    def load(self):
        if self.config.path:
            for line in open(self.config.path):
                row = json.loads(line)
                given = {"prompt": row["prompt"], "again": row["prompt"]}
                yield ProductTask(ProductData(answer=row["answer"], **given), self.config.task)
            return
        for i in range(self.config.num_tasks):
            data = ProductData(prompt=f"{i} * 7", system_prompt="Compute.", answer=str(i * 7))
            yield ProductTask(data, self.config.task)


class HereConfig(vf.HarnessConfig):
    stream: bool = False


class Here(vf.Harness[HereConfig]):
    APPENDS_SYSTEM_PROMPT = SUPPORTS_RESUME = True
    EXECUTES_CODE = NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        system, prompt = self.resolve_prompt(data)
        said = [{"role": "user", "content": prompt}]
        if not isinstance(prompt, str):
            said = [message_to_wire(one) for one in prompt]
        messages = ([{"role": "system", "content": system}] if system else []) + said
        async with openai.AsyncOpenAI(base_url=endpoint, api_key=secret) as client:
            ask = client.chat.completions.create
            answer = await ask(model=ctx.model, messages=messages, stream=self.config.stream)
            if self.config.stream:
                [_ async for _ in answer]
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


class ProductEnv(vf.SingleAgentEnv):
    """Asks twice."""

    async def run(self, task, agents):
        async with agents.agent.interaction(task) as interaction:
            segment = await interaction.turn()
            if not segment.terminated:
                await interaction.turn(task.data.again)


__all__ = ["ProductTaskset", "Here", "ProductEnv"]
'''


def write_environment(folder: Path) -> dict[str, Any]:
    """Write the module, under a new name; returns its `[env]` table. `folder` is on `sys.path`."""
    folder.mkdir(exist_ok=True)
    name = f"product_{uuid.uuid4().hex[:8]}"
    (folder / f"{name}.py").write_text(MODULE)
    importlib.invalidate_caches()
    return {
        "taskset": {"id": name},
        "agent": {"harness": {"id": name}, "runtime": {"type": "subprocess"}},
    }


def toml_of(env: dict[str, Any], *, prefix: str = "settings.env") -> str:
    """The table as lines of a TOML file."""
    lines = []
    for key, value in env.items():
        is_table = isinstance(value, dict)
        name = f"{prefix}.{key}"
        lines += [toml_of(value, prefix=name)] if is_table else [f"{name} = {json.dumps(value)}"]
    return "\n".join(lines)


@pytest.fixture
def env(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The table of an environment that can be imported."""
    monkeypatch.syspath_prepend(tmp_path)
    return write_environment(tmp_path)
