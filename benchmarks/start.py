"""A start by part, in wall and CPU seconds: `python benchmarks/start.py [CONFIG key=value ...]`.

Trains as `python -m gapo_megatron.train` does (without CONFIG the demo) until the engine has
sampled its first token, prints what each part took, and ends. CPU seconds are those of this
process and of its children that ended. For a start with nothing in vLLM's cache set
VLLM_CACHE_ROOT to a new folder.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import resource
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from gapo_megatron import train
from gapo_megatron.run.processes import process_age_s

_marks: list[tuple[str, float, float, float]] = []
"""Part, and seconds at its end: wall, CPU of this process, CPU of its children."""


def mark(part: str) -> None:
    """End a part."""
    own, children = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, -1))
    cpu = [one.ru_utime + one.ru_stime for one in (own, children)]
    _marks.append((part, process_age_s(), *cpu))


def marked(owner: Any, name: str, part: str) -> None:
    """Let a function of `owner` end a part."""
    function: Callable[..., Any] = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        mark(part)
        return result

    setattr(owner, name, call)


def mark_run() -> None:
    """Let the parts of a run's start end their part, and its first token the program."""
    from gapo_megatron.rollout.vllm import RolloutEngine
    from gapo_megatron.run import run, start

    marked(run, "check_inputs", "model config, tokenizer, data")
    marked(start, "join", "process group, run folder")
    marked(start, "resume", "verifiers, Megatron model, checkpoint")
    marked(start, "build_engine", "vLLM's engine")
    marked(start, "sync", "weight sync and its check")
    poll = RolloutEngine.poll

    def first(engine: RolloutEngine) -> Any:
        ended = poll(engine)
        states = engine.llm.output_processor.request_states.values()
        if ended or any(state.detokenizer.output_token_ids for state in states):
            mark("requests, first token")
            report()
        return ended

    RolloutEngine.poll = first  # type: ignore[method-assign]


def report() -> None:
    """Print the parts, and end this process and its workers."""
    before = ("", 0.0, 0.0, 0.0)
    for one in [*_marks, ("in all", *_marks[-1][1:])]:
        since = (0.0, 0.0, 0.0) if one[0] == "in all" else before[1:]
        wall, own, children = (now - then for now, then in zip(one[1:], since, strict=True))
        print(f"{one[0]:38} wall {wall:6.2f}   CPU {own:6.2f}   children {children:6.2f}")
        before = one
    sys.stdout.flush()
    for process in multiprocessing.active_children():
        process.kill()
    os._exit(0)


@contextlib.contextmanager
def imports() -> Iterator[None]:
    """The context of the imports, with the end of their part."""
    with _without_garbage_collection():
        yield
    mark("imports")
    mark_run()


if __name__ == "__main__":
    sys.argv[1:] = sys.argv[1:] or ["configs/demo.toml"]
    mark("Python, config's modules")
    marked(train, "check_before_imports", "config, early checks")
    _without_garbage_collection = train.without_garbage_collection
    train.without_garbage_collection = imports  # type: ignore[assignment]
    train.main()
