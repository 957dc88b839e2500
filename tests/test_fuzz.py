"""Five hundred damaged inputs (`make fuzz` has more), and what the fuzzer sees."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from gapo_megatron.errors import ConfigError
from tests.dist import run_distributed
from tests.fuzz.campaign import Target, campaign
from tests.fuzz.mutate import damage_json

_NUMBER = 500


def run_all(seed: int) -> tuple[Counter[str], list[str]]:
    """Outcomes by kind, and what was found."""
    from tests.fuzz.targets import TARGETS

    outcomes: Counter[str] = Counter()
    findings = []
    with campaign(TARGETS, seed=seed) as prepared:
        for target, number in prepared.cases(_NUMBER):
            outcome, finding = prepared.run(target, number)
            outcomes[outcome] += 1
            if finding:
                findings.append(str(finding))
    return outcomes, findings


@pytest.mark.system
def test_damaged_input_is_refused_by_name_or_read_as_it_is():
    # A rank of its own: a library that crashes does not take the tests with it.
    [(outcomes, findings)] = run_distributed(run_all, 1, 0)
    assert not findings, "\n\n".join(findings[:20])
    assert outcomes.total() == _NUMBER
    # Damage that nobody notices would prove nothing.
    assert outcomes["refused"] > _NUMBER / 2


# --- the fuzzer itself ---------------------------------------------------------------------------


def make_target(read, *, damage=None) -> Target:
    def write(folder: Path) -> None:
        (folder / "file.json").write_text(json.dumps({"a": 1, "b": [1, 2, 3], "c": "text"}))

    return Target("it", write, damage or (lambda rng, to: damage_json(rng, to, "file.json")), read)


def outcomes_of(target: Target, *, number: int = 60) -> Counter[str]:
    with campaign([target], seed=3) as prepared:
        return Counter(prepared.run(*case)[0] for case in prepared.cases(number))


def test_readers_that_do_less_are_found():
    def trusts(folder: Path) -> object:
        return json.loads((folder / "file.json").read_bytes())["a"]

    def hides(folder: Path) -> object:
        try:
            return trusts(folder)
        except Exception:
            raise ConfigError("something is wrong somewhere") from None

    assert {"accepted", "traceback"} <= set(outcomes_of(make_target(trusts)))
    assert {"accepted", "unnamed"} <= set(outcomes_of(make_target(hides)))
