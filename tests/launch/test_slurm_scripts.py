"""The batch scripts without Slurm: consistent resources, dry runs, and every decision of launch.sh.

launch.sh runs as it is, on local ranks; tests/stand_in_python.py takes the interpreter's place.
What only Slurm can do is tested on a private cluster, in tests/slurm.
"""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from shutil import which
from typing import Any

import pytest

from gapo_megatron.config import load_config
from gapo_tools.planner.layout import Layout
from tests.executables import write_program
from tests.waiting import HANG_S, wait_until

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted([*ROOT.glob("slurm/*.sbatch"), *ROOT.glob("slurm/*.sh"), *ROOT.glob("tools/*.sh")])
BATCH = [path for path in SCRIPTS if path.suffix == ".sbatch"]
LAUNCH = ROOT / "slurm" / "launch.sh"
STAND_IN = ROOT / "tests" / "stand_in_python.py"


def directives_of(path: Path) -> dict[str, str]:
    return dict(re.findall(r"^#SBATCH --([\w-]+)=?(\S*)", path.read_text(), re.MULTILINE))


def without_launcher_variables(**extra: str) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "MASTER_", "GAPO_"))}
    foreign = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GENERATION_NODES")
    kept = {k: v for k, v in kept.items() if k not in foreign}
    return kept | {"SITE_FILE": os.devnull} | extra  # not that of the checkout


def test_scripts_are_valid_bash() -> None:
    for path in SCRIPTS:
        subprocess.run(["bash", "-n", str(path)], check=True)
    shellcheck = Path(sys.executable).with_name("shellcheck")  # of requirements/dev.txt
    subprocess.run([str(shellcheck), *map(str, SCRIPTS)], check=True)


@pytest.mark.parametrize("path", BATCH, ids=lambda path: path.name)
def test_a_job_hears_of_its_end_and_keeps_its_log(path: Path) -> None:
    directives = directives_of(path)
    assert "requeue" in directives and directives["open-mode"] == "append"
    # B: only the batch shell. The ranks hear of it by the stop file, all at the same step.
    assert directives["signal"] == "B:USR1@300"
    if path.stem != "gapo_demo":
        assert directives["ntasks-per-node"] == directives["gpus-per-node"]
    # Tasks need to see each other's GPUs for peer-to-peer transfers.
    assert "gpus-per-task" not in directives


def dry_run(path: Path, folder: Path, python: str, *words: str, code: int = 0, **env: str) -> str:
    """What a batch script prints from another folder, without Slurm."""
    done = subprocess.run(
        ["bash", str(path), *words, "run.seed=7"],
        env=without_launcher_variables(DRY_RUN="1", PYTHON=python, **env),
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )
    assert done.returncode == code, done.stderr
    return done.stdout + (done.stderr if code else "")


def _told(folder: Path, what: str = '"$PWD"') -> str:
    """An interpreter that says where it runs (or `what` else), and with what arguments."""
    return str(write_program(folder / "python", f'printf "%s\\n" {what} "$@"'))


@pytest.mark.parametrize(
    ("name", "words", "nodes"),
    [
        ("gapo_demo", (), None),
        ("gapo_ds_r1", (), None),
        ("gapo", ("configs/deepcoder_1_5b/gapo_token.toml",), None),
        ("gapo", ("configs/llama_3_1_8b/h200_8k.toml",), None),
        ("gapo", ("configs/qwen2_5_72b/h200_8k.toml",), 8),
    ],
)
def test_asks_for_the_processes_its_config_needs(
    name: str, words: tuple[str, ...], nodes: int | None, tmp_path: Path
) -> None:
    """As its directives say, or as many nodes as `sbatch --nodes` asks for."""
    path = ROOT / "slurm" / f"{name}.sbatch"
    python = _told(tmp_path, '"$PWD" "$WORLD_SIZE"')
    directives = directives_of(path)
    tasks = int(nodes or directives["nodes"]) * int(directives["ntasks-per-node"])
    env = {"SLURM_NTASKS": str(tasks)} if nodes else {}
    folder, world_size, *found = dry_run(path, tmp_path, python, *words, **env).splitlines()
    assert int(world_size) == tasks
    assert found[:2] == ["-m", "gapo_megatron.train"]
    assert tuple(found[2 : 2 + len(words)]) == words
    assert found[-1] == "--dry-run"
    config = load_config(Path(folder) / found[2], found[3:-1])
    assert config.run.seed == 7
    Layout.of(config, world_size=tasks)  # refuses sizes that do not divide them


def test_a_dry_run_knows_nodes_and_those_that_generate(tmp_path: Path) -> None:
    """`GENERATION_NODES=2 sbatch --nodes=6`: in the job, where Slurm says what was asked for."""
    python = _told(tmp_path, '"$WORLD_SIZE" "$LOCAL_WORLD_SIZE"')
    script = ROOT / "slurm" / "gapo_ds_r1.sbatch"

    def found(**env: str) -> list[str]:
        return dry_run(script, tmp_path, python, **env).splitlines()

    six_nodes = {"SLURM_NTASKS": "48", "SLURM_NTASKS_PER_NODE": "8"}
    world_size, per_node, *words = found(GENERATION_NODES="2", **six_nodes)
    assert (world_size, per_node) == ("48", "8")
    assert words[-2:] == ["rollout.generation_nodes=2", "--dry-run"]
    # Beside a user's own settings, and last: what the environment says holds.
    assert "run.seed=7" in words
    assert not any("generation" in word for word in found(**six_nodes))
    assert found()[:2] == ["8", "8"]
    assert found(WORLD_SIZE="2")[:2] == ["2", "2"]
    assert found(WORLD_SIZE="32")[:2] == ["32", "8"]
    salloc = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "1", "SLURM_NTASKS_PER_NODE": "1"}
    assert found(WORLD_SIZE="32", **salloc)[:2] == ["32", "8"]


def test_settings_of_a_site_that_are_not_there_are_not_left_out(tmp_path: Path) -> None:
    script, missing = ROOT / "slurm" / "gapo_demo.sbatch", str(tmp_path / "site.sh")
    shown = dry_run(script, tmp_path, _told(tmp_path), SITE_FILE=missing, code=2)
    assert f"SITE_FILE ({missing})" in shown


def test_a_relative_config_is_one_of_the_folder_of_the_call(tmp_path: Path) -> None:
    """Which is not the repository, where the script goes; nor is SLURM_SUBMIT_DIR in salloc."""
    (tmp_path / "my.toml").touch()
    script, env = ROOT / "slurm" / "gapo.sbatch", {"SLURM_SUBMIT_DIR": str(tmp_path)}
    for given in ({}, env | {"SLURM_JOB_ID": "1"}):
        found = dry_run(script, tmp_path, _told(tmp_path), "my.toml", **given).splitlines()
        assert Path(found[0]) == ROOT and found[3] == str(tmp_path / "my.toml")


def test_every_command_of_the_demo_has_a_run_folder_of_its_own(tmp_path: Path) -> None:
    """What one has finished, another must neither find finished nor extend."""
    script, python = ROOT / "slurm" / "gapo_demo.sbatch", _told(tmp_path)

    def folder(*words: str, **env: str) -> str:
        found = dry_run(script, tmp_path, python, *words, **env).splitlines()
        return [word for word in found if word.startswith("run.output_dir=")][-1]

    job = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "1"}
    ran = [((), {}), (("run.num_steps=3",), {}), ((), {"WORLD_SIZE": "2"}), ((), job)]
    ran += [((), job | {"GENERATION_NODES": "1"}), (("run.num_steps=3",), job)]
    folders = [folder(*words, **env) for words, env in ran]
    assert len({*folders}) == len(ran)
    assert folder(**job | {"SLURM_JOB_ID": "8"}) == folders[3]  # submitted again: it resumes
    assert folder("run.output_dir=mine") == "run.output_dir=mine"


@pytest.mark.parametrize("one_disk", [True, False])
def test_what_slurm_writes_after_the_move_is_in_the_run_folder(
    one_disk: bool, tmp_path: Path
) -> None:
    run, opened = tmp_path / "attempt", tmp_path / "gapo-7.out"
    run.mkdir()
    (function,) = re.findall(r"^keep_output\(\) \{.*?^\}", LAUNCH.read_text(), re.M | re.S)
    script = f"mode=slurm attempt_dir=$PWD/attempt\n{function}\nkeep_output; echo later"
    env = {"SLURM_SUBMIT_DIR": str(tmp_path), "SLURM_JOB_NAME": "gapo", "SLURM_JOB_ID": "7"}
    if not one_disk:
        ln = write_program(tmp_path / "bin" / "ln", '[ "$1" = -sfn ] && exec /bin/ln "$@"')
        env["PATH"] = f"{ln.parent}:{os.environ['PATH']}"
    with opened.open("a") as output:
        env = without_launcher_variables(**env)
        subprocess.run(["bash", "-c", script], env=env, cwd=tmp_path, stdout=output, check=True)
        output.write("of Slurm\n")
    assert (run / "job.out").read_text() == "later\nof Slurm\n"
    assert opened.exists() != one_disk


class Run:
    """launch.sh on two local ranks in a folder of its own."""

    def __init__(self, folder: Path, *, launch: Path = LAUNCH, **env: str) -> None:
        self.folder = folder
        self.process = subprocess.Popen(
            ["bash", str(launch), "config.toml", "run.seed=7"],
            env=without_launcher_variables(
                **{"PYTHON": str(STAND_IN), "RUN_DIR": str(folder), "WORLD_SIZE": "2"} | env
            ),
            cwd=folder.parent,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # a group of its own, as in a terminal
            preexec_fn=_hear,
        )

    def wait_for(self, happened: Callable[[], bool], what: str) -> None:
        """Until it has happened, while the launcher runs."""

        def asked() -> bool:
            assert happened() or self.process.poll() is None, self.end()
            return happened()

        wait_until(asked, what)

    def wait_for_ranks(self, number: int = 2) -> None:
        """Until the ranks of the newest attempt are up."""
        latest = self.folder / "attempts" / "latest"
        logs = [latest / f"rank_{rank}.log" for rank in range(number)]
        self.wait_for(
            lambda: all(log.exists() and "rank" in log.read_text() for log in logs), "ranks"
        )

    def end(self) -> tuple[int, str]:
        """Exit code and output."""
        output, _ = self.process.communicate(timeout=HANG_S)
        return self.process.returncode, output

    @property
    def attempts(self) -> list[Path]:
        return sorted((self.folder / "attempts").glob("*.*"))

    def seen(self, rank: int = 1) -> dict[str, str]:
        """The variables that a rank of the first attempt was told to SHOW."""
        lines = (self.attempts[0] / f"rank_{rank}.log").read_text().splitlines()
        return dict(line.split("=", 1) for line in lines[:-1])

    @property
    def steps(self) -> list[str]:
        """The steps done, and in which attempt."""
        log = self.folder / "steps.log"
        lines = log.read_text().splitlines() if log.exists() else []
        return [line[: line.index(" ")] + line[line.rindex(".") :] for line in lines]


def _hear() -> None:
    """Also under nohup: a shell cannot trap what it was started to ignore."""
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)


Start = Callable[..., Run]


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return tmp_path / "run"


@pytest.fixture
def start() -> Iterator[Start]:
    """Makes a `Run`; what a failed test leaves is ended."""
    runs = []

    def start_one(folder: Path, **arguments: Any) -> Run:
        runs.append(Run(folder, **arguments))
        return runs[-1]

    yield start_one
    for run in runs:
        if run.process.poll() is None:
            run.process.terminate()
            run.end()


def test_a_run_ends_finished_and_stays_so(start: Start, run_dir: Path) -> None:
    mark = run_dir.parent / "mark"
    run = start(run_dir, PREPARE=f"-m prepared {mark}")
    exit_code, output = run.end()
    assert exit_code == 0
    assert mark.read_text() == "", "WORLD_SIZE is the ranks' to hear"
    assert "finished" in output
    assert "rank 0 of 2: train" in output  # rank 0 is shown while it runs
    (attempt,) = run.attempts
    assert re.fullmatch(r"local-\d{8}T\d{6}-\d+\.0", attempt.name)
    assert (run_dir / "attempts" / "latest").resolve() == attempt
    assert (run_dir / "OWNER").read_text() == f"{attempt.name}\n"
    assert (attempt / "rank_1.log").read_text() == "rank 1 of 2: train\n"
    assert list((attempt / "check").iterdir()) == [attempt / "check" / "localhost.ok"]
    (code,) = (run_dir / "code").iterdir()
    assert f"{code.name}.0" == attempt.name
    assert (code / "config.toml").read_text().startswith("config.toml run.seed=7 --world-size 2")

    again = start(run_dir)
    exit_code, output = again.end()
    assert exit_code == 0
    assert "has finished already" in output
    assert again.attempts == [attempt]


def test_a_rank_that_dies_ends_the_others_and_the_run_goes_on(start: Start, run_dir: Path) -> None:
    run = start(run_dir, ACTIONS="exit:7,kill,train")
    assert run.end()[0] == 0  # though rank 0 sleeps for an hour
    *failed, last = run.attempts
    assert [(attempt / "launch.log").read_text() for attempt in failed] == [
        "task 1: Exited with exit code 7\ntask 0: Terminated\n",
        "task 1: Killed\ntask 0: Terminated\n",
    ]
    assert (last / "outcome").read_text() == "finished\n"


def test_without_a_rank_that_generates_the_others_go_on(start: Start, run_dir: Path) -> None:
    run = start(run_dir, ACTIONS="lose", GENERATION="1")
    assert run.end()[0] == 0
    (attempt,) = run.attempts
    assert (attempt / "lost.log").read_text() == "task 1: Killed\n"
    assert (attempt / "launch.log").read_text() == ""
    assert (attempt / "outcome").read_text() == "finished\n"


@pytest.mark.parametrize(
    ("env", "exit_code", "num_attempts", "said"),
    [
        # A new checkpoint, of the second, starts the count of failures anew.
        ({"ACTIONS": "exit:7,save:7,exit:7"}, 7, 4, "MAX_FAILURES"),
        ({"ACTIONS": "save:7", "MAX_RESTARTS": "1"}, 7, 2, "1 restarts (MAX_RESTARTS)"),
        ({"ACTIONS": "kill", "MAX_FAILURES": "1"}, 137, 1, ""),
        # A retry mends neither a config nor the loss of the run to a newer attempt.
        ({"ACTIONS": "exit:2"}, 2, 1, ""),
        ({"ACTIONS": "exit:3"}, 3, 1, ""),
        # Ranks that end without an outcome have failed.
        ({"ACTIONS": "quit", "MAX_FAILURES": "1"}, 1, 1, ""),
    ],
    ids=lambda value: value["ACTIONS"] if isinstance(value, dict) else "",
)
def test_starts_of_a_job_are_bounded(
    start: Start, run_dir: Path, env: dict[str, str], exit_code: int, num_attempts: int, said: str
) -> None:
    run = start(run_dir, **env)
    found, output = run.end()
    assert found == exit_code
    assert said in output
    assert len(run.attempts) == num_attempts


def test_a_launcher_that_lost_the_run_starts_nothing_more(start: Start, run_dir: Path) -> None:
    run = start(run_dir, ACTIONS="wait:7")
    run.wait_for_ranks()
    (run_dir / "OWNER").write_text("99.1\n")
    (run.attempts[0] / "stop").touch()
    exit_code, output = run.end()
    assert exit_code == 3 and "99.1" in output
    assert len(run.attempts) == 1 and not (run_dir / "failures").exists()


def test_the_exit_code_is_that_of_what_failed_first(start: Start, run_dir: Path) -> None:
    """launch.log may have a victim in its first line: the postmortem knows better."""
    run = start(run_dir, ACTIONS="wait:7", MAX_FAILURES="1")
    run.wait_for_ranks()
    (run.attempts[0] / "exit_code").write_text("5\n")
    (run.attempts[0] / "stop").touch()
    assert run.end()[0] == 5


def test_preparation_that_fails_starts_nothing(start: Start, run_dir: Path) -> None:
    failed = start(run_dir, PREPARE="-m prepared /nowhere/mark")
    assert failed.end()[0] == 1 and failed.attempts == []


def test_a_greeting_is_not_the_folder_of_a_run(start: Start, run_dir: Path) -> None:
    run = start(run_dir, BANNER="Welcome\n/to a container")
    assert run.end()[0] == 0
    assert [path.name for path in run.attempts] == [(run_dir / "OWNER").read_text().strip()]


def test_prepare_names_the_folder_of_a_run(start: Start, run_dir: Path) -> None:
    exit_code, output = start(run_dir, GENERATION="0\nlater").end()
    assert exit_code == 1 and "launch.prepare" in output


@pytest.mark.parametrize("number", ["1", "-1", "08"])
def test_nodes_that_leave_none_to_train_start_nothing(
    start: Start, run_dir: Path, number: str
) -> None:
    mark = run_dir.parent / "mark"
    run = start(run_dir, GENERATION_NODES=number, PREPARE=f"-m prepared {mark}")
    exit_code, output = run.end()
    assert exit_code == 2 and f"GENERATION_NODES ({number})" in output
    assert not run_dir.exists() and not mark.exists()


def test_no_healthy_node_is_an_error(start: Start, run_dir: Path) -> None:
    run = start(run_dir, BAD_NODES="localhost")
    exit_code, output = run.end()
    assert exit_code == 90
    assert "bad nodes: localhost" in output
    assert output.rstrip().splitlines()[-1].count("localhost: ") == 1  # and what it lacks
    assert not (run.attempts[0] / "rank_0.log").exists()


def test_a_stop_saves_and_the_next_start_goes_on(start: Start, run_dir: Path) -> None:
    run, other = (start(folder, STEPS="10000") for folder in (run_dir, run_dir.with_name("other")))
    for one, number in ((run, signal.SIGUSR1), (other, signal.SIGUSR2)):
        one.wait_for_ranks()
        one.process.send_signal(number)
        exit_code, output = one.end()
        assert exit_code == 0
        assert "asked to save" in output
        assert "stopped" in output
        assert (one.attempts[0] / "stop").exists()
    done = len(run.steps)
    assert done < 10_000

    again = start(run_dir, STEPS=str(done + 3))
    assert again.end()[0] == 0
    assert again.steps == [f"{step}.0" for step in range(1, done + 4)]


def ranks_of(run: Run) -> list[str]:
    """Processes of the newest attempt's ranks that are alive, whoever their parent is by now."""
    attempt = f"GAPO_ATTEMPT_DIR={run.attempts[-1]}\0".encode()
    alive = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # ended, or another user's
            told = path.read_bytes() + b"\0"
            if attempt in told and b"LOCAL_RANK=" in told:
                alive.append(path.parent.name)
    return alive


def assert_ranks_ended(run: Run) -> None:
    log = (run.attempts[0] / "launch.log").read_text()
    assert sorted(log.splitlines()) == ["task 0: Terminated", "task 1: Terminated"]


@pytest.mark.parametrize(
    "numbers",
    [(signal.SIGINT,), (signal.SIGINT, signal.SIGINT), (signal.SIGQUIT,), (signal.SIGHUP,)],
    ids=["Ctrl-C", "Ctrl-C twice", "Ctrl-backslash", "hang-up"],
)
def test_what_a_user_does_at_a_terminal_leaves_nobody_behind(
    start: Start, run_dir: Path, numbers: tuple[signal.Signals, ...]
) -> None:
    """A terminal sends a signal to all processes of its group."""
    is_stop = numbers == (signal.SIGINT,)
    run = start(run_dir, **{"STEPS": "10000", "SAVE_S": "0.5"} if is_stop else {"ACTIONS": "hang"})
    run.wait_for_ranks()
    assert len(ranks_of(run)) >= 2
    for number in numbers:
        os.killpg(run.process.pid, number)
        if len(numbers) == 2:
            run.wait_for((run.attempts[0] / "stop").exists, "a request to stop")
    exit_code, output = run.end()
    assert ranks_of(run) == []
    if is_stop:
        assert exit_code == 0 and "asked to save" in output
        assert (run.attempts[0] / "outcome").read_text() == "stopped\n"
    else:
        assert exit_code == 143
        assert_ranks_ended(run)


def test_a_folder_in_use_is_refused_until_its_run_is_cancelled(start: Start, run_dir: Path) -> None:
    run = start(run_dir, ACTIONS="hang")
    run.wait_for_ranks()
    owner = run.attempts[0].name.removesuffix(".0")
    exit_code, output = start(run_dir).end()
    assert exit_code == 2
    assert f"job {owner} " in output
    run.process.terminate()
    exit_code, output = run.end()
    assert exit_code == 143 and "cancelled" in output
    assert len(run.attempts) == 1
    assert_ranks_ended(run)
    assert start(run_dir).end()[0] == 0


CORES, GPUS = {"SLURM_CPUS_PER_TASK": "12"}, {"SLURM_GPUS_ON_NODE": "8"}


def check_told(run: Run, expected: dict[str, str], *, given: dict[str, str]) -> str:
    """The ranks of a run were told this; the port of it, too."""
    exit_code, output = run.end()
    assert exit_code == 0, output
    (code,) = (run.folder / "code").iterdir()
    seen = run.seen()
    port = seen.pop("MASTER_PORT")
    assert run.seen(0)["MASTER_PORT"] == port
    low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    assert low <= int(port) <= high
    places = {"code": code, "attempt": run.attempts[0]}
    assert seen == {name: value.format(**places) for name, value in expected.items()}
    words = (code / "config.toml").read_text().split()
    assert ("rollout.generation_nodes=0" in words) == ("GENERATION_NODES" in given)
    assert words[words.index("--ranks-per-node") + 1] == "2"
    return port


def test_what_a_rank_is_told(start: Start, run_dir: Path) -> None:
    """With all that a user may say, and with next to nothing; both at once, each on its port."""
    cache, secrets = run_dir.parent / "cache", run_dir.parent / "secrets"
    secrets.write_text("KEY=hunter2\n")
    secrets.chmod(0o600)
    given = CORES | GPUS | {"CACHE_DIR": str(cache), "SECRETS": str(secrets)}
    given |= {"PYTHONPATH": "/theirs", "TRITON_CACHE_DIR": "/theirs", "OMP_NUM_THREADS": ""}
    # As a library of LD_PRELOAD may, in every process.
    stat = write_program(run_dir.parent / "bin" / "stat", f'echo noise >&2; {which("stat")} "$@"')
    given |= {"PATH": f"{stat.parent}:{os.environ['PATH']}"}
    expected = {
        **{"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost"},
        **{"GAPO_ATTEMPT": "{code.name}.0", "GAPO_ATTEMPT_DIR": "{attempt}"},
        **{"GAPO_JOB_END": "None", "PYTHONPATH": "{code}:/theirs", "PYTHONSAFEPATH": "1"},
        # Compiled kernels: on a disk of the node, unless the site says otherwise.
        **{"CACHE_DIR": f"{cache}", "VLLM_CACHE_ROOT": f"{cache}/vllm"},
        **{"TRITON_CACHE_DIR": "/theirs", "FLASHINFER_WORKSPACE_BASE": f"{cache}"},
        **{"OMP_NUM_THREADS": "8", "KEY": "hunter2"},
    }
    # 0 is a setting, too, of a config that says otherwise.
    less = CORES | {"GENERATION_NODES": "0", "OMP_NUM_THREADS": ""}
    less |= {"CHECK_NODES": "0", "BAD_NODES": "localhost"}
    usual = {
        "LOCAL_WORLD_SIZE": "2",
        "TRITON_CACHE_DIR": f"/tmp/gapo_cache_{os.getuid()}/triton",
        "OMP_NUM_THREADS": "1",  # without a GPU their number decides bits
    }
    cases = [(run_dir, given, expected), (run_dir.with_name("other"), less, usual)]
    runs = [
        start(folder, SHOW=" ".join([*told, "MASTER_PORT"]), **env) for folder, env, told in cases
    ]
    ports = {
        check_told(run, told, given=env) for run, (_, env, told) in zip(runs, cases, strict=True)
    }
    assert len(ports) == 2


def test_site_settings_and_a_container(start: Start, run_dir: Path) -> None:
    tree = run_dir.parent / "tree"
    shutil.copytree(ROOT / "slurm", tree / "slurm")
    (tree / "slurm" / "site.sh").write_text(
        f"[ -z $UNSET ] && false\n"  # what modules do, and strict bash does not bear
        f"PYTHON={STAND_IN}\nCONTAINER='env IN_CONTAINER=1'\nexport NCCL_DEBUG=WARN\n"
    )
    launch = tree / "slurm" / "launch.sh"
    run = start(run_dir, launch=launch, SITE_FILE="", PYTHON="", SHOW="IN_CONTAINER NCCL_DEBUG")
    assert run.end()[0] == 0
    assert run.seen() == {"IN_CONTAINER": "1", "NCCL_DEBUG": "WARN"}


@pytest.mark.parametrize(
    ("content", "mode"),
    [
        ("KEY=hunter2\n", 0o640),
        ("KEY = hunter2\n", 0o600),  # bash would show the line
        ("KEY=a hunter2\nOTHER=b\n", 0o600),
        (None, 0),
    ],
)
def test_secrets_are_not_shown(start: Start, run_dir: Path, content: str | None, mode: int) -> None:
    secrets = run_dir.parent / "secrets"
    if content is not None:
        secrets.write_text(content)
        secrets.chmod(mode)
    exit_code, output = start(run_dir, SECRETS=str(secrets)).end()
    assert exit_code == 2
    assert f"SECRETS ({secrets})" in output and "hunter2" not in output


def test_a_rank_that_ignores_its_end_is_killed(start: Start, run_dir: Path) -> None:
    """Its launcher sleeps for ten seconds, by a `sleep` that only says so."""
    slept = run_dir.parent / "slept"
    sleep = write_program(run_dir.parent / "bin" / "sleep", f'echo "$1" >>{slept}')
    path = f"{sleep.parent}:{os.environ['PATH']}"
    run = start(run_dir, ACTIONS="deaf:7", MAX_FAILURES="1", PATH=path)
    assert run.end()[0] == 7
    assert sum(map(float, slept.read_text().split())) == pytest.approx(10)
    assert "rank 0" in (run.attempts[0] / "rank_0.log").read_text()


def has_ended(pid: str) -> bool:
    """Gone, or dead and waiting for a parent to notice."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def test_children_end_with_their_ranks(start: Start, run_dir: Path) -> None:
    run = start(run_dir, ACTIONS="parent:7", MAX_FAILURES="1")
    assert run.end()[0] == 7
    children = [path.read_text() for path in run.attempts[0].glob("child_*")]
    assert len(children) == 2
    for child in children:
        wait_until(lambda child=child: has_ended(child), "the end of a rank's child")


@pytest.mark.parametrize("program", ["prepare", "preflight"])
def test_signals_before_the_ranks_are_heard(start: Start, run_dir: Path, program: str) -> None:
    stopped = start(run_dir, SLOW=program)
    cancelled = start(run_dir.with_name("cancelled"), SLOW=program)
    for run, number in ((stopped, signal.SIGUSR1), (cancelled, signal.SIGTERM)):
        run.wait_for(run.folder.with_suffix(".waits").exists, program)
        run.process.send_signal(number)
        run.folder.with_suffix(".go").touch()
    exit_code, output = stopped.end()
    assert (exit_code, "stopped" in output) == (0, True)
    assert not (run_dir / "steps.log").exists()
    assert cancelled.end()[0] == 143
    assert not list(cancelled.folder.glob("attempts/*/rank_0.log"))


# -- in a job --------------------------------------------------------------------------------------


@pytest.fixture
def slurm(run_dir: Path) -> dict[str, Any]:
    """What starts `Run` in job 7, of one task, of a Slurm that only answers.

    It shows what `show` wrote, keeps what it is asked to do in the file `asked`, and obeys the
    environment where Slurm's commands do.
    """
    folder = run_dir.parent
    shutil.copytree(ROOT / "slurm", folder / "tree" / "slurm")
    write_program(
        folder / "bin" / "scontrol",
        'case "$*" in\n'
        '"show hostnames"*) echo n1 ;;\n'
        f'*"show job"*) cat {folder}/shown ;;\n'
        f'*) echo "$*" >>{folder}/asked ;;\n'
        "esac",
    )
    write_program(
        folder / "bin" / "squeue",
        '[ -z "${SLURM_CLUSTERS:-}" ] || echo "CLUSTER: $SLURM_CLUSTERS"\n'
        '[ "${SQUEUE_STATES:-RUNNING}" = RUNNING ] || exit 0\n'
        "format=${SLURM_TIME_FORMAT:-standard}\n"
        'case "$*" in\n'
        '*%e) date -d @2000000000 "+${format/standard/%FT%T}" ;;\n'
        '*"%T %r") echo "${JOB_STATE:-RUNNING} None" ;;\n'
        f'*"%A %T") cat {folder}/listed ;;\n'
        "esac",
    )
    write_program(
        folder / "bin" / "srun",
        "while [[ $1 == -* ]]; do [[ $1 != --output=* ]] || output=${1#*=}; shift; done\n"
        'SLURM_STEP_ID=0 SLURM_PROCID=0 exec "$@" &>"${output/\\%t/0}"',
    )
    return {
        **{"launch": folder / "tree" / "slurm" / "launch.sh", "CHECK_NODES": "0"},
        **{"SLURM_JOB_ID": "7", "SLURM_NTASKS": "1", "SLURM_NTASKS_PER_NODE": "1"},
        **{"SLURM_JOB_NODELIST": "n1", "WORLD_SIZE": ""},
        "PATH": f"{folder}/bin:{os.environ['PATH']}",
    }


def show(run_dir: Path, *jobs: tuple[str, int, int]) -> None:
    """What `scontrol show job` shows: of each job its ids, restarts and BatchFlag."""
    name = "a ArrayJobId=1 ArrayTaskId=2 Restarts=3 BatchFlag=0"
    line = (
        f"JobId={{}} JobName={name} UserId=a(1) Requeue=1 Restarts={{}} BatchFlag={{}} Reboot=0\n"
    )
    (run_dir.parent / "shown").write_text("".join(line.format(*job) for job in jobs))


def test_every_start_by_hand_in_an_allocation_is_its_own(
    start: Start, run_dir: Path, slurm: dict[str, Any]
) -> None:
    """Also in an interactive step, whose environment is that of a batch script."""
    show(run_dir, ("7", 0, 0))
    slurm |= {"SLURM_STEP_ID": "4294967290", "SLURM_PROCID": "0", "SHOW": "GAPO_REQUEUES"}
    first = start(run_dir, ACTIONS="hang", **slurm)
    first.wait_for_ranks(1)
    (attempt,) = first.attempts
    assert re.fullmatch(r"7-\d{8}T\d{6}-\d+\.0", attempt.name)
    assert first.seen(0) == {"GAPO_REQUEUES": "None"}
    exit_code, output = start(run_dir, **slurm).end()
    assert exit_code == 2 and f"job {attempt.stem} " in output
    first.process.terminate()
    assert first.end()[0] == 143
    again = start(run_dir, **slurm)
    assert again.end()[0] == 0
    codes = {path.name for path in (run_dir / "code").iterdir()}
    assert {path.stem for path in again.attempts} < codes and len(again.attempts) == 2


@pytest.mark.parametrize(("state", "goes_on"), [("SIGNALING", True), ("COMPLETING", False)])
def test_only_a_job_that_goes_on_is_requeued(
    start: Start, run_dir: Path, slurm: dict[str, Any], state: str, goes_on: bool
) -> None:
    show(run_dir, ("7", 0, 1))
    exit_code, output = start(run_dir, ACTIONS="exit:7", JOB_STATE=state, **slurm).end()
    assert (exit_code, "cancelled" in output) == ((0, False) if goes_on else (143, True))
    assert (run_dir.parent / "asked").exists() == goes_on


@pytest.mark.parametrize(
    ("state", "is_refused"),
    [("RUNNING", True), ("STOPPED", True), ("REQUEUE_HOLD", False), ("COMPLETING", False)],
)
def test_a_folder_is_in_use_while_its_job_has_processes(
    start: Start, run_dir: Path, slurm: dict[str, Any], state: str, is_refused: bool
) -> None:
    show(run_dir, ("7", 0, 1))
    (run_dir.parent / "listed").write_text(f"15 RUNNING\n5 {state}\n")
    run_dir.mkdir()
    (run_dir / "OWNER").write_text("5.1\n")
    run = start(run_dir, STEPS="0", **slurm)
    exit_code, output = run.end()
    assert exit_code == (2 if is_refused else 0), output
    assert ("job 5 is running" in output) == is_refused == (run.attempts == [])


def test_what_a_start_left_does_not_speak_for_the_next_one(
    start: Start, run_dir: Path, slurm: dict[str, Any]
) -> None:
    """Though both are of one job."""
    show(run_dir, ("7", 1, 1))
    used = run_dir / "attempts" / "7.1"
    used.mkdir(parents=True)
    (run_dir / "OWNER").write_text("7.1\n")
    (used / "outcome").write_text("stopped\n")
    run = start(run_dir, ACTIONS="exit:7", MAX_FAILURES="1", **slurm)
    exit_code, output = run.end()
    assert exit_code == 1 and "MAX_FAILURES" in output
    (attempt,) = {*run.attempts} - {used}
    assert re.fullmatch(r"7\.1-\d{8}T\d{6}-\d+", attempt.name)
    assert (run_dir / "OWNER").read_text() == f"{attempt.name}\n"
    assert (run_dir / "attempts" / "latest").resolve() == attempt


ARRAY = [("7 ArrayJobId=7 ArrayTaskId=3", 1, 1), ("6 ArrayJobId=7 ArrayTaskId=0", 5, 1)]


@pytest.mark.parametrize(
    ("jobs", "attempt", "requeued"),
    [
        ([("7", 0, 1)], "7.0", "7"),
        ([("7", 2, 2)], "7.2", "7"),  # BatchFlag: one that Slurm could not start at once
        (ARRAY, "7.1", "7_3"),
        (ARRAY[::-1], "7.1", "7_3"),
    ],
)
def test_a_job_is_what_slurm_says_of_it(
    start: Start,
    run_dir: Path,
    slurm: dict[str, Any],
    jobs: list[tuple[str, int, int]],
    attempt: str,
    requeued: str,
) -> None:
    """Submitted within a restarted task of an array, it has that task's variables."""
    show(run_dir, *jobs)
    slurm |= {"SLURM_ARRAY_JOB_ID": "4", "SLURM_ARRAY_TASK_ID": "2", "SLURM_RESTART_COUNT": "4"}
    run = start(run_dir, ACTIONS="exit:7", SHOW="GAPO_REQUEUES", **slurm)
    exit_code, output = run.end()
    assert exit_code == 0, output
    assert [path.name for path in run.attempts] == [attempt]
    words = (run_dir / "code" / "7" / "config.toml").read_text().split()
    assert f"7.{words[words.index('--restarts') + 1]}" == attempt
    assert run.seen(0) == {"GAPO_REQUEUES": "1"}
    assert (run_dir.parent / "asked").read_text() == f"requeue {requeued}\n"


@pytest.mark.parametrize(
    ("name", "value"),
    [("SQUEUE_STATES", "PD"), ("SLURM_TIME_FORMAT", "%d.%m."), ("SLURM_CLUSTERS", "a")],
)
def test_what_a_user_likes_to_read_of_slurm_changes_no_decision(
    start: Start, run_dir: Path, slurm: dict[str, Any], name: str, value: str
) -> None:
    show(run_dir, ("7", 0, 1))
    site = run_dir.parent / "site.sh"
    site.write_text(f"export {name}={value}\n")  # as in the shell where sbatch was called
    slurm |= {"SITE_FILE": str(site), name: value}
    run = start(run_dir, ACTIONS="exit:7", SHOW="GAPO_JOB_END", **slurm)
    exit_code, output = run.end()
    assert exit_code == 0 and "cancelled" not in output
    assert run.seen(0) == {"GAPO_JOB_END": "2000000000"}


@pytest.mark.parametrize(
    ("later", "exit_code"),
    [("cp later shown", 0), (":", 75), ("echo error: Invalid job id specified >shown", 1)],
)
def test_a_start_waits_for_slurms_controller(
    start: Start, run_dir: Path, slurm: dict[str, Any], later: str, exit_code: int
) -> None:
    show(run_dir, ("7", 0, 1))
    folder = run_dir.parent
    (folder / "shown").rename(folder / "later")
    write_program(folder / "bin" / "sleep", f"cd {folder}\n{later}")
    found, output = start(run_dir, **slurm).end()
    assert (found, run_dir.exists()) == (exit_code, not exit_code), output
    assert not exit_code or "job 7" in output or "shown" in output


def test_usage() -> None:
    def called(*words: object, **env: str) -> subprocess.CompletedProcess[str]:
        command, env = ["bash", *map(str, words)], without_launcher_variables(**env)
        return subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True)

    assert called(LAUNCH).returncode == 2
    batch = called("slurm/gapo.sbatch")
    assert batch.returncode == 2 and "slurm/gapo.sbatch CONFIG" in batch.stderr
    missing = called(LAUNCH, "config.toml", PYTHON="/nowhere/python")
    assert missing.returncode == 2
    assert "/nowhere/python" in missing.stderr and "PYTHON" in missing.stderr
