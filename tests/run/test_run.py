"""The loop and its stages, without a model, an engine or a process group."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from gapo_megatron import train as program
from gapo_megatron.checkpoint import OpenStep, State
from gapo_megatron.clock import Expectation, Stopwatch
from gapo_megatron.config import CheckpointConfig, Config, load_config
from gapo_megatron.data.source import PromptSource
from gapo_megatron.data.template_date import DATE_NAME
from gapo_megatron.io.run_folder import mark_finished
from gapo_megatron.learn.plan import DataParallelRanks
from gapo_megatron.learn.step import Progress
from gapo_megatron.objective import make_batch
from gapo_megatron.rollout.table import to_rollouts
from gapo_megatron.rollout.verify import WeightCheck
from gapo_megatron.rollouts import Rollouts
from gapo_megatron.run import colocated, saving, start
from gapo_megatron.run import run as module
from gapo_megatron.run.colocated import Colocated
from gapo_megatron.run.run import Run
from gapo_megatron.run.saving import Checkpoints
from gapo_megatron.types import Episode, Outcome, Prompt, Verdict
from tests.configs import config_of
from tests.scripted_engine import QueueChannel

NUM_STEPS, NUM_PROBLEMS = 4, 6
PROBLEMS = [Prompt(f"p{i}", (1, 2), "3") for i in range(NUM_PROBLEMS)]


def make_config(folder: Path, **sections: dict[str, Any]) -> Config:
    usual = {
        "run": {"output_dir": str(folder), "num_steps": NUM_STEPS},
        "model": {"hf_dir": str(folder / "model")},
        "data": {"eval_path": "unused"},
        "batch": {"rollout_prompts": 2, "minibatch_prompts": 1, "rollouts_per_prompt": 2},
        "checkpoint": {"every_steps": 2},
        "evaluation": {"every_steps": 3},
        "metrics": {"rounding_every_steps": 0},
    }
    return config_of(usual, sections)


VERDICTS = (Verdict(Outcome.CORRECT), Verdict(Outcome.WRONG))


def group(prompt: Prompt, size: int = 2) -> tuple[Episode, ...]:
    tokens = np.array([5, 6], np.int32), np.array([-1, -2], np.float32)
    return tuple(Episode(prompt, i, *tokens) for i in range(size))


def judged(prompts: Sequence[Prompt]) -> Rollouts:
    return to_rollouts([group(prompt) for prompt in prompts], [VERDICTS for _ in prompts])


class Script:
    """Script of the events in a run, and record of its actions.

    Attributes:
        events: what the run did, in order.
        stop: event after which a stop is asked for; empty for none.
        stages: names of the stages that were entered.
        places: seed and step that each call of `learn` was given.
        is_written: whether files that are written while training continues are written.
    """

    def __init__(self, stop: str = "") -> None:
        self.events: list[str] = []
        self.saved: list[State] = []
        self.logged: list[tuple[int, dict[str, float]]] = []
        self.stages: list[str] = []
        self.places: list[tuple[int, int]] = []
        self.stop = stop
        self.is_written = True

    @property
    def asked(self) -> bool:
        return bool(self.stop) and self.stop in self.events

    def did(self, event: str) -> Any:
        self.events.append(event)
        return None


class ScriptedAttempt:
    name, leads = "7.0", True

    def __init__(self, script: Script) -> None:
        self.script = script
        self.expected: list[Expectation] = []

    def alive(self) -> None:
        pass

    def enter(self, stage: str) -> None:
        self.script.stages.append(stage)

    def must_stop(self, needed: Expectation) -> bool:
        self.expected.append(needed)
        return self.script.asked

    def agree(self, value: bool) -> bool:
        return value

    def patience(self, expected: Expectation) -> Callable[[float], bool]:
        return lambda elapsed_s: self.script.asked

    def keep_stage_seconds(self, recent: object) -> None:
        pass

    def require_ownership(self) -> None:
        pass

    def end(self, outcome: str) -> None:
        self.script.did(outcome)


class ScriptedSaving:
    """Written when the script says so."""

    work_s, whole_s = 7.0, 9.0

    def __init__(self, script: Script, step: int, in_background: bool) -> None:
        self.script, self.in_background = script, in_background
        self.document = SimpleNamespace(step=step)

    def is_written(self) -> bool:
        return self.script.is_written

    def finish(self) -> None:
        if self.in_background:
            self.script.did(f"whole {self.document.step}")


class ScriptedRollouter:
    """Draws two prompts per step; keeps a third open if told to."""

    def __init__(self, script: Script, source: PromptSource, *, keeps_open: bool) -> None:
        self.script = script
        self.source = source
        self.keeps_open = keeps_open
        self.open_groups = Rollouts.join([])
        self.environment = None
        self.channel = QueueChannel(0, {}, size=1)

    def evaluation_calls(self, step: int) -> None:
        """Nothing answers the model."""

    def gather_open_groups(self) -> list[tuple[Episode, ...]]:
        return cast(Any, self.open_groups)

    def collect(self, step: int, *, attempt: Any, stopwatch: Stopwatch) -> Rollouts | None:
        prompts = self.source.next_batch(2)
        self.script.did(f"collect {step}")
        if attempt.patience(stopwatch.expect("rollout"))(0.0):
            return None
        self.open_groups = to_rollouts([group(PROBLEMS[0], 1)] if self.keeps_open else [])
        return replace(judged(prompts), metrics={"from": 1.0})


@pytest.fixture
def make_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Run]:
    """A run whose stages follow a `Script`, with real data positions, steps, batches and plans."""

    def make(
        script: Script,
        config: Config | None = None,
        *,
        state: State | None = None,
        resumed: State | None = None,
        keeps_open: bool = False,
    ) -> Run:
        config = config or make_config(tmp_path)
        attempt = cast(Any, ScriptedAttempt(script))
        inputs = cast(
            Any,
            SimpleNamespace(
                held_out=PROBLEMS[:1] if config.evaluation.every_steps else [],
                source=PromptSource(PROBLEMS, seed=0),
                tokenizer=None,
                turns=SimpleNamespace(eos_token_ids={1}),
            ),
        )
        stopwatch = Stopwatch()
        rollouter = cast(Any, ScriptedRollouter(script, inputs.source, keeps_open=keeps_open))
        groups = SimpleNamespace(rank=0, dp_size=1)
        policy = cast(
            Any, SimpleNamespace(groups=groups, device=torch.device("cpu"), precision="fp32")
        )
        engine = cast(
            Any,
            SimpleNamespace(
                sleep=lambda: script.did("sleep"), replicas=SimpleNamespace(gloo_group=None)
            ),
        )
        memory = cast(Any, SimpleNamespace(note=lambda moment: None, lap=lambda group: {}))

        def log(step: int, metrics: dict[str, float], timings: object = None) -> None:
            script.logged.append((step, metrics))
            script.did(f"log {step}")

        writer = cast(
            Any,
            SimpleNamespace(log=log, log_samples=lambda *_: None, close=lambda **_: None),
        )
        generation = Colocated(
            config=config,
            engine=engine,
            rollouter=rollouter,
            policy=policy,
            pool=cast(Any, SimpleNamespace(close=lambda: None)),
            source=inputs.source,
            held_out=inputs.held_out,
            attempt=attempt,
            stopwatch=stopwatch,
            dp_ranks=DataParallelRanks((0,), (0,)),
        )
        channel = rollouter.channel
        checkpoints = Checkpoints(config, policy, generation, channel, attempt, stopwatch)
        if resumed:
            checkpoints.note_resumed(resumed)

        def evaluate(*_: object, output: Path, should_abort: Any, **__: object) -> Any:
            script.did(f"evaluate {output.stem.removeprefix('step_')}")
            return None if should_abort(0.0) else {"eval/pass@1": 0.5}

        def learn(
            *_: object,
            progress: Progress,
            place: tuple[int, int],
            must_stop: Callable[[], bool],
            **__: object,
        ) -> dict[str, float] | None:
            script.places.append(place)
            for i in range(progress.num_updates, 2):
                if must_stop():
                    return None
                progress.grad_norms.append(1.0)
                script.did(f"update {i}")
            return {"loss/policy": 0.25}

        def begin_save(
            run_dir: object, state: State, *, in_background: bool, **_: object
        ) -> ScriptedSaving:
            script.saved.append(copy.deepcopy(state))  # later changes are not on disk
            kind = " ahead" if state.is_ahead else " open" if state.open_step else ""
            script.did(f"save {state.step}{kind}")
            return ScriptedSaving(script, state.step, in_background)

        monkeypatch.setattr(colocated, "evaluate", evaluate)
        monkeypatch.setattr(module, "learn", learn)
        monkeypatch.setattr(colocated, "sync", lambda *_, **__: WeightCheck(0.0, 0.0))
        monkeypatch.setattr(colocated, "carry", lambda *_, **__: ["carried"])
        monkeypatch.setattr(module, "export", lambda *_, end_tokens: script.did("export"))
        monkeypatch.setattr(saving.checkpoint, "begin_save", begin_save)
        return Run(
            config=config,
            attempt=attempt,
            policy=policy,
            generation=generation,
            inputs=inputs,
            state=state or State(),
            checkpoints=checkpoints,
            writer=writer,
            stopwatch=stopwatch,
            memory=memory,
            gloo_group=None,
            tokens=cast(Any, SimpleNamespace(rows=lambda *_: [], log=lambda *_: None)),
        )

    return make


@pytest.fixture
def train(monkeypatch: pytest.MonkeyPatch) -> Callable[[Run], None]:
    """The loop of `gapo_megatron.train` itself, over a run that has started."""

    def loop(run: Run) -> None:
        monkeypatch.setattr(program, "check_before_imports", lambda *_, **__: None)
        monkeypatch.setattr(Run, "start", lambda *_, **__: run)
        program.train(run.config)

    return loop


@pytest.fixture
def play(make_run: Callable[..., Run], train: Callable[[Run], None]) -> Callable[..., Script]:
    """Train a run of `make_run` to its end, or stop it after an event; returns its script."""

    def run(stop: str = "", *arguments: Any, **options: Any) -> Script:
        script = Script(stop)
        train(make_run(script, *arguments, **options))
        return script

    return run


def remaining(source_state: Any) -> int:
    """Problems still to be drawn from a data position, later epochs included."""
    return len(source_state["remaining"]) - NUM_PROBLEMS * source_state["epoch"]


def open_step(updates: int, *, evaluated: dict[str, float] | None = None) -> OpenStep:
    batch = make_batch(judged(PROBLEMS[:2]), make_config(Path("/x")).objective.resolve())
    return OpenStep(batch, {"from": 2.0}, evaluated or {}, Progress(grad_norms=[1.0] * updates))


def test_a_run_evaluates_and_saves_where_due(play: Any) -> None:
    script = play()
    step = ["sleep", "update 0", "update 1"]
    assert script.events == [
        *("evaluate 0", "log 0", "collect 0", *step, "log 0"),
        *("collect 1", *step, "log 1", "save 2"),
        *("collect 2", *step, "log 2"),
        *("evaluate 3", "log 3", "collect 3", *step, "log 3", "save 4"),
        *("evaluate 4", "log 4", "sleep", "export", "finished"),
    ]
    # A finished step is saved with the prompts it has drawn, and nothing of it is open.
    assert [remaining(state.source) for state in script.saved] == [2, -2]


def test_metrics_of_a_step_are_those_of_its_stages(play: Any) -> None:
    script = play()
    metrics = dict(script.logged)[1]
    assert metrics["from"] == 1 and metrics["loss/policy"] == 0.25
    assert metrics["per_c/groups/c1"] == 2 and metrics["sync/max_abs_log_prob_diff"] == 0
    assert metrics["sync/ratio_deviation"] == metrics["sync/ratio_deviation_share"] == 0


def test_stages_are_named_by_their_step_and_a_save_by_the_step_it_follows(play: Any) -> None:
    script = play()
    assert script.stages[0] == "step 0: evaluate"
    assert "step 1: checkpoint" in script.stages and "step 2: checkpoint" not in script.stages
    assert script.stages[-2:] == ["step 4: evaluate", "export"]


def test_a_stop_between_steps_saves_what_is_not_saved(play: Any) -> None:
    script = play("log 0", make_config(Path("/x"), evaluation={"every_steps": 0}))
    assert script.events[-3:] == ["log 0", "save 1", "stopped"]
    assert script.saved[-1].open_step is None

    script = play("save 2")  # it is saved there already
    assert script.events[-2:] == ["save 2", "stopped"]
    assert [state.step for state in script.saved] == [2]


@pytest.mark.parametrize(("stop", "step"), [("evaluate 3", 3), ("collect 1", 1), ("collect 0", 0)])
def test_a_resume_repeats_an_aborted_stage(play: Any, stop: str, step: int) -> None:
    """A resume evaluates and draws again: its data position is before the step."""
    script = play(stop)
    assert script.events[-3:] == [stop, f"save {step}", "stopped"]
    (*_, state) = script.saved
    assert state.open_step is None
    assert remaining(state.source) == NUM_PROBLEMS - 2 * step


def test_a_stop_within_a_step_keeps_its_rollouts_and_updates(make_run: Any, train: Any) -> None:
    script = Script(stop="update 0")
    run = make_run(script, keeps_open=True)
    train(run)
    assert script.events[-3:] == ["update 0", "save 0 open", "stopped"]
    (state,) = script.saved
    assert state.open_step is not None
    assert state.open_step.progress.num_updates == 1
    assert state.open_step.evaluated == {"eval/pass@1": 0.5}
    # Drawn and carried: the resumed run continues with them.
    assert remaining(state.source) == NUM_PROBLEMS - 2
    assert state.open_groups[0] == "carried"


@pytest.mark.parametrize("stop", ["update 0", "evaluate 3"])
def test_discarded_tokens_count_in_their_step_or_the_next(
    make_run: Any, train: Any, play: Any, monkeypatch: pytest.MonkeyPatch, stop: str
) -> None:
    """Tokens sampled ahead count in the interrupted step, or are saved for the next."""
    script = Script(stop=stop)
    run = make_run(script)
    monkeypatch.setattr(run.generation, "discard_ahead", lambda: 7)
    train(run)
    assert not script.saved[-1].num_given_back, "on-policy the same samples come again"

    script = Script(stop=stop)
    run = make_run(script)
    monkeypatch.setattr(run.generation, "discard_ahead", lambda: 7)
    monkeypatch.setattr(run.generation, "samples_ahead", True)
    train(run)
    state = script.saved[-1]
    name = "rollout/given_back_tokens"
    if state.open_step is not None:
        assert state.open_step.metrics[name] == 7 and not state.num_given_back
        return
    assert state.num_given_back == 7
    script = play(state=State(step=state.step, num_given_back=7))
    counted = [(step, metrics[name]) for step, metrics in script.logged if name in metrics]
    assert counted == [(state.step, 7)]


def test_a_checkpoint_between_steps_holds_the_batch_that_was_sampled_ahead(
    make_run: Any, train: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is written once that batch is collected, and before its first update."""
    script = Script()
    run = make_run(script)
    monkeypatch.setattr(run.generation, "samples_ahead", True)
    train(run)
    assert [event for event in script.events if event[:4] in ("coll", "save")] == [
        *("collect 0", "collect 1", "collect 2", "save 2 ahead", "collect 3", "save 4"),
    ]
    ahead, last = script.saved
    assert last.open_step is None
    assert [remaining(ahead.source_before), remaining(ahead.source)] == [2, 0]


@pytest.mark.parametrize("stop", ["log 1", "log 2"])
def test_a_stop_keeps_the_batch_that_was_sampled_ahead(
    make_run: Any, train: Any, monkeypatch: pytest.MonkeyPatch, stop: str
) -> None:
    """In one checkpoint, with the number of discarded tokens; but not before an evaluation."""
    script = Script(stop=stop)
    run = make_run(script)
    monkeypatch.setattr(run.generation, "samples_ahead", True)
    monkeypatch.setattr(run.generation, "has_batch", lambda step: True)
    monkeypatch.setattr(run.generation, "discard_ahead", lambda: 7)
    monkeypatch.setattr(run.attempt, "patience", lambda _: lambda elapsed_s: False)
    train(run)
    (*_, state) = script.saved
    if stop == "log 2":  # an evaluation is due
        assert script.events[-3:] == ["log 2", "save 3", "stopped"]
        assert state.num_given_back == 7
        return
    assert script.events[-5:] == ["log 1", "collect 2", "sleep", "save 2 ahead", "stopped"]
    assert state.open_step.metrics["rollout/given_back_tokens"] == 7


def test_an_open_step_comes_first_and_is_not_sampled_again(play: Any) -> None:
    opened = open_step(1, evaluated={"eval/pass@1": 0.75})
    script = play(state=State(step=3, open_step=opened))
    assert script.events == [
        *("log 3", "sleep", "update 1", "log 3", "save 4"),
        *("evaluate 4", "log 4", "sleep", "export", "finished"),
    ]
    assert script.logged[0] == (3, {"eval/pass@1": 0.75})
    assert script.logged[1][1]["from"] == 2


def test_an_open_step_that_is_stopped_again_is_saved_once_more_if_it_went_on(play: Any) -> None:
    for stop, expected in (("log 3", []), ("update 0", ["save 3 open"])):
        opened = open_step(0, evaluated={"eval/pass@1": 0.75})
        state = State(step=3, open_step=opened)
        script = play(stop, state=state, resumed=state)
        assert [event for event in script.events if "save" in event] == expected
        assert script.events[-1] == "stopped"


def test_a_run_with_more_steps_done_than_it_has_trains_and_exports_nothing(play: Any) -> None:
    state = State(step=NUM_STEPS + 1)
    assert play(state=state, resumed=state).events == ["stopped"]


def test_any_other_error_passes_and_nothing_is_written(make_run: Any, train: Any) -> None:
    script = Script()
    run = make_run(script)
    run.writer.log = lambda *_: 1 / 0
    with pytest.raises(ZeroDivisionError):
        train(run)
    assert script.events == ["evaluate 0"]


@pytest.mark.parametrize("is_generation", [False, True])
@pytest.mark.parametrize("is_finished", [False, True])
def test_both_sides_of_a_finished_run_part_together(
    tmp_path: Path, is_generation: bool, is_finished: bool
) -> None:
    """The mailbox ends with trainer 0: others may not yet have read that the run is finished."""
    mark_finished(tmp_path, num_steps=NUM_STEPS if is_finished else NUM_STEPS - 1)
    said = b"finished" if is_finished else b"begins"
    done: list[object] = []
    bridge = SimpleNamespace(
        is_generation=is_generation,
        wait=lambda find, alive: find(),
        mail=SimpleNamespace(look=lambda name: said, post=lambda name, value: done.append(value)),
        close=lambda: done.append("left"),
    )
    attempt = SimpleNamespace(leads=True, agree=lambda value: value, restart_watch=None)
    world = cast(Any, SimpleNamespace(bridge=bridge))
    found = start.is_finished_everywhere(make_config(tmp_path).run, world, cast(Any, attempt))
    assert found == is_finished
    assert done == [said][is_generation:] + ["left"] * is_finished


def test_a_batch_is_not_waited_for_where_the_time_is_up(
    make_run: Any, train: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The batch of a checkpoint, sampled ahead, is kept although the job would end."""
    script = Script(stop="log 1")
    run = make_run(script)
    monkeypatch.setattr(run.generation, "samples_ahead", True)
    train(run)
    assert script.events[-3:] == ["log 1", "save 2", "stopped"]


def test_a_finished_run_says_so_and_builds_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Rank 0 decides for all: peers may see an older state of the disk."""
    mark_finished(tmp_path, num_steps=NUM_STEPS)
    script = Script()
    attempt = cast(Any, ScriptedAttempt(script))
    monkeypatch.setattr(program, "check_before_imports", lambda *_, **__: None)
    monkeypatch.setattr(module, "check_inputs", lambda _: None)
    for rank, answer in ((0, True), (1, False)):
        agreed: list[bool] = []
        attempt.agree = lambda value, agreed=agreed: agreed.append(value) or True
        world = SimpleNamespace(rank=rank, bridge=None)
        attempt.leads = rank == 0
        monkeypatch.setattr(start, "join", lambda *_, world=world: (world, attempt))
        with caplog.at_level("INFO"):
            program.train(make_config(tmp_path))
        assert agreed == [answer] and script.events.pop() == "finished"
        assert f"all {NUM_STEPS} steps are done" in caplog.text


def test_open_groups_of_a_checkpoint_are_held_by_generation_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """All their tokens are on every rank: kept in the state they would take memory to the end."""
    opened, resumed = [group(PROBLEMS[0])], list[Any]()
    attempt = cast(Any, ScriptedAttempt(Script()))
    attempt.stage_seconds = dict
    world = SimpleNamespace(bridge=None, rank=0, gloo_group=None, device=torch.device("cpu"))
    for name, value in {
        "join": (world, attempt),
        "is_finished_everywhere": False,
        "begin_branch": None,
        "start_pool": SimpleNamespace(),
        "build_policy": None,
        "resume": State(step=1, open_groups=opened),
        "sizes": {},
    }.items():
        monkeypatch.setattr(start, name, lambda *_, value=value, **__: value)
    monkeypatch.setattr(
        start, "start_colocated", lambda trainer, *_: resumed.extend(trainer.state.open_groups)
    )
    monkeypatch.setattr(module, "check_inputs", lambda _: SimpleNamespace(source=None))
    writer = SimpleNamespace(log_startup=lambda *_, **__: None)
    monkeypatch.setattr(module, "MetricsWriter", lambda *_, **__: writer)
    run = Run.start(make_config(tmp_path))
    assert isinstance(run, Run) and resumed == opened
    assert not run.state.open_groups


def test_two_sides_hear_of_each_other_from_their_meeting_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Loading a model takes long: ranks that wait must not be ended by their watches."""
    attempt = SimpleNamespace(on_alive=None, enter=lambda stage: None)
    bridge = SimpleNamespace(is_generation=False, num_generation=1, beat=lambda: None)
    world = SimpleNamespace(bridge=bridge, device=None, world_size=1)
    monkeypatch.setattr(start.process_group, "start", lambda *_, **__: world)
    monkeypatch.setattr(start.process_group, "seed_everything", lambda _: None)
    monkeypatch.setattr(start.Attempt, "begin", lambda *_, **__: attempt)
    monkeypatch.setattr(start, "check_engine", lambda *_, **__: None)
    inputs = SimpleNamespace(hf_config=None, source=PromptSource(PROBLEMS, seed=0))
    start.join(make_config(tmp_path), cast(Any, inputs), Stopwatch())
    assert attempt.on_alive is bridge.beat


def resume(
    config: Config, monkeypatch: pytest.MonkeyPatch, loaded: State | None, *, rank: int = 0
) -> PromptSource:
    monkeypatch.setattr(start.checkpoint, "load_latest", lambda *_, **__: loaded)
    policy = cast(Any, SimpleNamespace(groups=SimpleNamespace(rank=rank)))
    source = PromptSource(PROBLEMS, seed=0)
    attempt = cast(Any, ScriptedAttempt(Script()))
    assert start.resume(config, policy, source, attempt, Stopwatch()) is loaded
    return source


def test_a_run_begins_at_step_0_and_leaves_its_config(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = make_config(tmp_path)
    resume(config, monkeypatch, None, rank=1)
    assert not any(tmp_path.iterdir()), "rank 0 writes"
    source = resume(config, monkeypatch, None)
    assert remaining(source.state_dict()) == NUM_PROBLEMS
    assert load_config(tmp_path / "config.toml") == config
    assert not (tmp_path / DATE_NAME).exists(), "no date in the prompts"


def test_a_resumed_run_draws_on_from_its_data_position(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    drawn = PromptSource(PROBLEMS, seed=0)
    drawn.next_batch(4)
    state = State(step=3, source=drawn.state_dict())
    source = resume(make_config(tmp_path), monkeypatch, state)
    assert remaining(source.state_dict()) == NUM_PROBLEMS - 4


@pytest.fixture
def timed(make_run: Any) -> Iterator[Run]:
    """A run that knows the times of its stages."""
    run = make_run(Script(), make_config(Path("/x"), batch={"dynamic_sampling_rounds": 1}))
    seconds = {"evaluate": 1.0, "rollout": 10.0, "reward": 100.0, "carry": 1e3}
    seconds |= {"old_log_probs": 1e4, "update": 1e5, "checkpoint": 1e6}
    run.stopwatch.recent = {stage: [value] for stage, value in seconds.items()}
    yield run


def test_time_is_asked_for_until_the_next_question_and_a_save(timed: Any) -> None:
    """An evaluation and every round of sampling cannot be saved half done."""
    steps = timed.steps()
    step = next(steps)
    expected = timed.attempt.expected
    assert expected[-1].longest_s == 1 + 2 * (10 + 100) + 1000 + 1e6
    timed.stopwatch.recent |= {"old_log_probs": [1e4], "update": [1e5], "evaluate": [1.0]}
    timed.learn(timed.make_batch(timed.collect(step)))
    assert expected[-1].longest_s == 1e4 + 1e5 + 1e6


def test_a_steps_chance_is_of_the_seed_and_its_number(make_run: Any) -> None:
    script = Script()
    run = make_run(script, make_config(Path("/x"), run={"seed": 7}))
    for step in run.steps():
        run.learn(run.make_batch(run.collect(step)))
        break
    assert script.places == [(7, 0)]


EVERY_STEP_BEHIND = CheckpointConfig(every_steps=1, background=True)


@pytest.fixture
def behind(tmp_path: Path) -> Config:
    """Saves after every step, while training continues."""
    config = make_config(
        tmp_path,
        run={"output_dir": str(tmp_path), "num_steps": 3},
        evaluation={"every_steps": 0},
    )
    return config.model_copy(update={"checkpoint": EVERY_STEP_BEHIND})


def with_timed_save(run: Run) -> Run:
    """A run whose earlier attempt has timed a save."""
    run.stopwatch.recent = {"checkpoint": [1.0]}
    return run


def saves(script: Script) -> list[str]:
    words = ("collect", "save", "whole", "stopped", "export")
    return [event for event in script.events if event.startswith(words)]


def test_training_goes_on_while_a_checkpoint_is_written(behind: Config, play: Any) -> None:
    """It is published after the next step; the last one is whole before the export."""
    script = play("", behind)
    assert saves(script) == [
        *("collect 0", "save 1"),  # whole at once: no save has been timed yet
        *("collect 1", "save 2"),
        *("collect 2", "whole 2", "save 3", "export"),
    ]
    sparse = behind.model_copy(update={"checkpoint": CheckpointConfig(every_steps=0)})
    assert saves(play("", sparse)) == [*map("collect {}".format, range(3)), "save 3", "export"]


def test_a_save_waits_for_the_one_before_it(behind: Config, make_run: Any, train: Any) -> None:
    script = Script()
    script.is_written = False
    settings = behind.checkpoint.model_copy(update={"every_steps": 2})
    train(with_timed_save(make_run(script, behind.model_copy(update={"checkpoint": settings}))))
    assert saves(script)[2:] == ["save 2", "collect 2", "whole 2", "save 3", "export"]


class StoppedInStepOne(Script):
    """Asked to stop in the first update of the second step."""

    @property
    def asked(self) -> bool:
        return self.events.count("update 0") == 2


def test_a_stop_finishes_what_is_under_way_and_waits_for_its_own(
    behind: Config, make_run: Any, train: Any
) -> None:
    first = ["collect 0", "save 1"]
    for script, events in (
        (Script("save 1"), ["whole 1", "stopped"]),  # nothing has changed since
        (StoppedInStepOne(), ["collect 1", "whole 1", "save 1 open", "stopped"]),
    ):
        script.is_written = False
        train(with_timed_save(make_run(script, behind)))
        assert saves(script) == [*first, *events]


def save_behind(run: Run) -> None:
    config = run.config.model_copy(update={"checkpoint": EVERY_STEP_BEHIND})
    run.checkpoints.config = config
    run.checkpoints.save(run.state)


def test_a_save_under_way_counts_twice_until_a_stop(timed: Any) -> None:
    """A stop finishes it, and then writes its own."""
    save_behind(timed)
    steps = timed.steps()
    next(steps)
    assert timed.attempt.expected[-1].longest_s == 1 + 2 * (10 + 100) + 1000 + 2e6


def test_what_is_expected_of_a_save_is_all_its_work(timed: Any) -> None:
    """Training waits for less, which is what its time says."""
    save_behind(with_timed_save(timed))
    assert timed.stopwatch.recent["checkpoint"] == [1.0]
    timed.checkpoints.finish_if_written()
    assert timed.stopwatch.recent["checkpoint"] == [1.0, 7.0]
    lap = timed.stopwatch.lap(num_tokens=1)
    assert lap["time/checkpoint_s"] < 7 and lap["perf/checkpoint_whole_s"] == 9
