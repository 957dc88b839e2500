"""Documents that tell the truth: links resolve, and what they tell a reader to run exists."""

import ast
import re
import runpy
import subprocess
import tomllib
from pathlib import Path

import pytest

from gapo_megatron.config import Config, load_config
from gapo_megatron.config.methods import METHODS
from gapo_tools.jobs.study import read_study
from tests.messages import mentions

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted(
    [
        *ROOT.glob("*.md"),
        *ROOT.glob("docs/**/*.md"),
        *ROOT.glob("benchmarks/*.md"),
        *ROOT.glob("studies/**/*.md"),
    ]
)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
MADE_BY_THE_READER = {"slurm/site.sh"}
FENCE = re.compile(r"^```(?:bash|console|sh)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def anchors_of(path: Path) -> set[str]:
    headings = re.findall(r"^#+ +(.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {
        re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in headings
    }


def commands_of(path: Path) -> list[list[str]]:
    """Words of every command line in the document's shell blocks, comments and prompts removed."""
    text = path.read_text(encoding="utf-8")
    lines = [
        line.removeprefix("$ ").split(" #")[0].strip()
        for block in FENCE.findall(text)
        for line in block.replace("\\\n", " ").splitlines()
    ]
    return [line.split() for line in lines if line and not line.startswith("#")]


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_links_resolve(path: Path) -> None:
    for target in LINK.findall(path.read_text(encoding="utf-8")):
        if re.match(r"https?://|mailto:", target):
            continue
        file, _, anchor = target.partition("#")
        resolved = (path.parent / file) if file else path
        assert resolved.exists(), f"{target} leads nowhere"
        if anchor:
            assert anchor in anchors_of(resolved), f"{target}: no such heading"


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_commands_name_things_that_exist(path: Path) -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for words in commands_of(path):
        for word in words:
            if re.match(r"(tools|slurm|configs|requirements|benchmarks|tests)/[\w./]+$", word):
                exists = word in MADE_BY_THE_READER or (ROOT / word).exists()
                assert exists, f"{' '.join(words)}: no {word}"
        words = [word for word in words if not re.match(r"[A-Z_]+=", word)]
        if words[:1] == ["make"]:
            goals = [word for word in words[1:] if re.fullmatch("[a-z]+", word)]
            assert set(goals) <= targets, f"{' '.join(words)}: no such target"
        if "-m" in words and words[words.index("-m") + 1].startswith("gapo_megatron"):
            module = ROOT / (words[words.index("-m") + 1].replace(".", "/") + ".py")
            assert module.exists(), f"{' '.join(words)}: no {module}"


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_overrides_in_commands_are_valid(path: Path) -> None:
    for words in commands_of(path):
        configs = [word for word in words if re.match(r"configs/[\w/]+\.toml$", word)]
        overrides = [word for word in words if re.match(r"[a-z]+\.[a-z_]+=", word)]
        if configs:
            path = ROOT / configs[0]
            is_study = "config" in tomllib.loads(path.read_text(encoding="utf-8"))
            (read_study if is_study else load_config)(path, overrides)


def test_settings_named_in_documents_exist() -> None:
    fields = {name: field.annotation for name, field in Config.model_fields.items()}
    known = {name: of.model_fields for name, of in fields.items() if hasattr(of, "model_fields")}
    named = re.compile(r"`([a-z]+)\.([a-z_]+)(?: ?=[^`]*)?`")
    wrong = [
        f"{name_of(path)}: {section}.{key}"
        for path in DOCUMENTS
        for section, key in named.findall(path.read_text(encoding="utf-8"))
        if section in known and key not in {*known[section], "jsonl", "pt"}  # of file names
    ]
    assert not wrong


def test_the_configuration_reference_is_current() -> None:
    tool = runpy.run_path(str(ROOT / "tools/configuration.py"))
    written = (ROOT / "docs/configuration.md").read_text(encoding="utf-8")
    assert written == tool["document"](), "run tools/configuration.py"


def test_the_tables_of_methods_have_the_numbers_of_the_presets() -> None:
    text = (ROOT / "docs/objective.md").read_text("utf-8")
    rows = [line[2:-2].split(" | ") for line in text.splitlines() if line.startswith("| `")]
    tables = {len(row): row for row in rows if row[0].strip("`") in METHODS}
    assert {*tables} == {4, 5, 7}, "methods; rivals and their sources"
    methods = {row[0].strip("`"): row for row in rows if len(row) == 7}
    rivals = {row[0].strip("`"): row for row in rows if len(row) == 5}
    assert {*methods, *rivals} == {*METHODS}
    for name, (_, ratio, low, high, _, aggregation, advantage) in methods.items():
        method = METHODS[name]
        assert (ratio, aggregation) == (method.ratio, method.aggregation), name
        assert (float(high), "std" in advantage) == (method.eps_high_max, method.normalize_std)
        assert (1 if low == "none" else float(low)) == method.eps_low, name
    for name, (_, _, _, how, _) in rivals.items():
        aggregation, _, advantage = how.partition(", ")
        assert aggregation == METHODS[name].aggregation, name
        assert ("std" in advantage) == METHODS[name].normalize_std, name


def _needs_arguments(script: Path) -> bool:
    for node in ast.walk(ast.parse(script.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "add_argument":
            first = ast.literal_eval(node.args[0])
            given = {key.arg: ast.unparse(key.value) for key in node.keywords}
            may_lack = first.startswith("-") or given.get("nargs") in ("'*'", "'?'")
            if not may_lack or given.get("required") == "True":
                return True
    return False


def test_make_names_the_cpus_that_it_knows() -> None:
    """A misspelt one would test this CPU as it is."""

    def plan(cpu: str) -> subprocess.CompletedProcess[str]:
        command = ["make", "--dry-run", "--no-print-directory", "test", f"CPU={cpu}"]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)

    wrong = plan("avx")
    assert wrong.returncode != 0 and re.search(
        mentions("CPU", "(avx)", "avx2", "default"), wrong.stderr
    )
    for cpu, sets in {"avx2": True, "default": True, "": False}.items():
        assert ("ATEN_CPU_CAPABILITY" in plan(cpu).stdout) == sets


def test_make_bench_runs_every_script_that_needs_no_arguments() -> None:
    """One that does would end it with a usage error, before those after it."""
    command = ["make", "--dry-run", "--no-print-directory", "bench"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    scripts = [path for path in ROOT.glob("benchmarks/*.py") if "__main__" in path.read_text()]
    expected = {name_of(path) for path in scripts if not _needs_arguments(path)}
    assert set(re.findall(r"benchmarks/\w+\.py", done.stdout)) == expected
    assert len(expected) > 1


def test_models_are_evaluated_as_the_configs_train_them() -> None:
    trained = {load_config(path).data.chat_template for path in ROOT.glob("configs/*/base.toml")}
    assert trained == {True}
    for path in DOCUMENTS:
        for words in commands_of(path):
            if "tools/evaluate.py" in words and "--model" in words:
                assert "--chat-template" in words, f"{name_of(path)}: {' '.join(words)}"


def test_names_are_in_the_files_beside_them() -> None:
    """`NAME` (`path/to/file.py`)."""
    wrong = [
        f"{name_of(path)}: {name} is not in {file}"
        for path in DOCUMENTS
        for name, file in re.findall(
            r"`(?:\w+\.)*(\w+)` \(`(?:gapo_megatron/)?([\w/]+\.py)`\)", path.read_text("utf-8")
        )
        for found in [[one for one in (ROOT / "gapo_megatron" / file, ROOT / file) if one.exists()]]
        if not found or name not in found[0].read_text("utf-8")
    ]
    assert not wrong


def test_metrics_that_the_page_names_are_in_the_code() -> None:
    """The other direction, that each name that a run logs is on the page, takes runs."""
    from tests.train_setup import documented_names

    code = "".join(path.read_text("utf-8") for path in (ROOT / "gapo_megatron").rglob("*.py"))
    gone = []
    for name in documented_names():
        *_, word = [part for part in re.split(r"/|\{\w+\}", name) if part]
        if re.sub(r"_(s|share|share_min)$", "", word.strip("_")) not in code:
            gone.append(name)
    assert gone == []
