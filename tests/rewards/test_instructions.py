"""IFEval's instructions: for each one responses that follow it and responses that do not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gapo_megatron.errors import DataError
from gapo_megatron.rewards import instructions
from gapo_megatron.types import Outcome
from gapo_tools.evaluation.benchmarks import BENCHMARKS
from tests.messages import mentions

DATA = Path(__file__).parents[3] / "shared" / "data"


def answer_of(*given: tuple[str, dict], loose: bool = False) -> str:
    rows = [{"id": name, **arguments} for name, arguments in given]
    return json.dumps({"instructions": rows, "loose": loose})


CASES: dict[str, list[tuple[dict, list[str], list[str]]]] = {
    "keywords:existence": [
        (
            {"keywords": ["mom", "Mother"]},
            ["My MOM is a mother.", "momentum, motherboard"],  # inside of words too
            ["My mom.", "nothing"],
        )
    ],
    "keywords:frequency": [
        (
            {"keyword": "fake", "frequency": 2, "relation": "at least"},
            ["Fake and FAKE.", "fakefake"],
            ["One fake."],
        ),
        (
            {"keyword": "fake", "frequency": 2, "relation": "less than"},
            ["One fake.", "none"],
            ["fake fake"],
        ),
    ],
    "keywords:forbidden_words": [
        (
            {"forbidden_words": ["rock", "a.b"]},
            ["rocket, bedrock", "axb"],  # whole words only, and no patterns
            ["Rock on.", "an a.b here"],
        )
    ],
    "keywords:letter_frequency": [
        (
            {"letter": "q", "let_frequency": 2, "let_relation": "at least"},
            ["Q and q", "qq"],
            ["q", "none"],
        ),
        ({"letter": "!", "let_frequency": 1, "let_relation": "less than"}, ["no."], ["yes!"]),
    ],
    "length_constraints:number_sentences": [
        (
            {"num_sentences": 3, "relation": "at least"},
            [
                "One. Two! Three?",
                "Dr. Smith left at 5 p.m. He ran. End",
                'He said "Stop!" Then: no. Yes.',
            ],
            ["One. Two.", "Mr. J. Smith paid 3.50 at 5 p.m. today.", "Wait... what"],
        ),
        ({"num_sentences": 3, "relation": "less than"}, ["One. Two."], ["One. Two. Three."]),
    ],
    "length_constraints:number_paragraphs": [
        (
            {"num_paragraphs": 2},
            ["one\n***\ntwo", "***\none\n***\ntwo\n***"],
            ["one\n\ntwo", "one *** two *** three", "one\n***\n\n***\ntwo"],
        )
    ],
    "length_constraints:number_words": [
        ({"num_words": 3, "relation": "at least"}, ["one, two three", "it's ok"], ["one two"]),
        ({"num_words": 3, "relation": "less than"}, ["one two"], ["one two three"]),
    ],
    "length_constraints:nth_paragraph_first_word": [
        (
            {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "Weekend"},
            ["one\n\nweekend plans", 'one\n\n"Weekend!" he said'],
            ["weekend\n\none", "one\n\nweekend\n\nthree", "one\nweekend", "one\n\nweekends"],
        )
    ],
    "detectable_content:number_placeholders": [
        ({"num_placeholders": 2}, ["[name] and [address]"], ["[name]", "[na\nme] [x]"])
    ],
    "detectable_content:postscript": [
        ({"postscript_marker": "P.S."}, ["Bye.\np. s. more", "P.S. x"], ["PS more", "Bye."]),
        ({"postscript_marker": "P.P.S"}, ["Bye. P.P.S more", "p. p. s"], ["P.S. more"]),
    ],
    "detectable_format:number_bullet_lists": [
        (
            {"num_bullets": 2},
            ["* one\n* two", "Here:\n - one\n * two"],
            ["* one", "* one\n* two\n* three", "**one**\n**two**"],
        )
    ],
    "detectable_format:constrained_response": [
        ({}, ["My answer is maybe.", "Well. My answer is no. Why?"], ["Maybe.", "My answer is yes"])
    ],
    "detectable_format:number_highlighted_sections": [
        (
            {"num_highlights": 2},
            ["*one* and *two*", "**one** and *two*"],
            ["*one*", "** ** *a*", "*one\ntwo* *three*"],
        )
    ],
    "detectable_format:multiple_sections": [
        (
            {"section_spliter": "SECTION", "num_sections": 2},
            ["SECTION 1\na\nSECTION 2\nb"],
            ["SECTION 1\na", "Section 1 Section 2", "SECTION one SECTION two"],
        )
    ],
    "detectable_format:json_format": [
        (
            {},
            ['{"a": [1, 2]}', '```json\n{"a": 1}\n```', "```\n[]\n```"],
            ["{a: 1}", 'Sure: {"a": 1}', "[" * 100_000],
        )
    ],
    "detectable_format:title": [
        ({}, ["<<poem of joy>>\ntext", "text <<x>>"], ["<poem>", "<<>>", "<<a\nb>>"])
    ],
    "combination:two_responses": [
        (
            {},
            ["one\n******\ntwo", "******one******two******"],
            ["one", "one******one", "one******two******three", "one************two"],
        )
    ],
    "combination:repeat_prompt": [
        ({"prompt_to_repeat": " Write it. "}, ["write it. Done."], ["Done. Write it.", "Write"])
    ],
    "startend:end_checker": [
        ({"end_phrase": "Peace!"}, ["So long. peace!", '"Peace!" '], ["Peace! Bye."])
    ],
    "startend:quotation": [({}, ['"all of it"', ' "a" and "b"\n'], ['"half', '"', "'a'"])],
    "change_case:capital_word_frequency": [
        (
            {"capital_frequency": 2, "capital_relation": "at least"},
            ["I saw NASA.", "(THE) 'END'"],
            ["NASA rose.", "Two Words 12 34"],
        ),
        (
            {"capital_frequency": 2, "capital_relation": "less than"},
            ["NASA rose."],
            ["NASA and ESA"],
        ),
    ],
    "punctuation:no_comma": [({}, ["no commas; none"], ["one, two"])],
    # As langdetect tells languages.
    "language:response_language": [
        (
            {"language": "de"},
            ["Das ist ein kurzer Satz in deutscher Sprache."],
            ["This is a short sentence in the English language."],
        )
    ],
    "change_case:english_capital": [
        (
            {},
            ["THIS IS A SHORT SENTENCE IN THE ENGLISH LANGUAGE."],
            ["DAS IST EIN KURZER SATZ IN DEUTSCHER SPRACHE.", "This is one in English, too."],
        )
    ],
    "change_case:english_lowercase": [
        (
            {},
            ["this is a short sentence in the english language."],
            ["das ist ein kurzer satz in deutscher sprache.", "This is one in English, too."],
        )
    ],
}
ROWS = [
    pytest.param(name, arguments, response, outcome, id=f"{name}-{outcome}-{number}")
    for name, cases in CASES.items()
    for number, (arguments, followed, broken) in enumerate(cases)
    for outcome, responses in ((Outcome.CORRECT, followed), (Outcome.WRONG, broken))
    for response in responses
]


def test_every_instruction_has_examples() -> None:
    assert set(CASES) == set(instructions._CHECKS)


@pytest.mark.parametrize(("name", "arguments", "response", "outcome"), ROWS)
def test_examples(name: str, arguments: dict, response: str, outcome: Outcome) -> None:
    verdict = instructions.verify(response, answer_of((name, arguments)))
    assert verdict.outcome is outcome
    assert verdict.reason == "" if outcome is Outcome.CORRECT else name in verdict.reason


@pytest.mark.parametrize(
    "run", [".", "[", "*", "*a", "<<", ">>", "{", "_", "p.", "\n", " ", "* a\n"]
)
def test_no_check_takes_long_for_a_response_that_repeats_itself(run: str) -> None:
    """Less than a second; minutes, which no test has, where a check reads it once per character."""
    for name, cases in CASES.items():
        if "lang" in name or "english" in name:
            continue
        for end in ("", "x"):  # what may end a sentence, and what may not
            instructions.verify("Six. " * 6 + run * 200_000 + end, answer_of((name, cases[0][0])))


NO_COMMA, QUOTED = ("punctuation:no_comma", {}), ("startend:quotation", {})
BEARS = ("keywords:existence", {"keywords": ["bears"]})
GERMAN = ("language:response_language", {"language": "de"})


@pytest.mark.parametrize(
    ("response", "given", "strict", "loose"),
    [
        # Loosely without first line, last line and asterisks, but not lax.
        ("Sure, here it is:\nno commas", [NO_COMMA], "wrong", "correct"),
        ("no commas\nHope this helps, bye", [NO_COMMA], "wrong", "correct"),
        ("Sure, this:\nno commas\nWell, bye", [NO_COMMA], "wrong", "correct"),
        ('*"quoted"*', [QUOTED], "wrong", "correct"),
        ('Sure:\n*"quoted"*\nBye', [QUOTED], "wrong", "correct"),
        ("one\ntwo, three\nfour", [NO_COMMA], "wrong", "wrong"),
        # A line that is taken off leaves nothing, which follows nothing.
        ("a, b", [NO_COMMA], "wrong", "wrong"),
        (" \n", [NO_COMMA], "wrong", "wrong"),
        # All of them have to be followed.
        ('one, "two"', [NO_COMMA, QUOTED], "wrong", "wrong"),
        ('"one"', [NO_COMMA, QUOTED], "correct", "correct"),
        # The final answer alone is read.
        ("<think>\nOkay, so bears.</think>\n\nBears sleep.", [NO_COMMA, BEARS], *["correct"] * 2),
        ("<think>bears</think>They sleep.", [BEARS], "wrong", "wrong"),
        ("<think>bears", [BEARS], "wrong", "wrong"),
        # No language can be detected.
        ("123 456", [GERMAN, NO_COMMA], "unknown", "unknown"),
        ("123, 456", [GERMAN, NO_COMMA], "wrong", "wrong"),
    ],
)
def test_strict_and_loose_verdicts(response, given, strict, loose) -> None:
    verdict = instructions.verify(response, answer_of(*given))
    assert verdict.outcome == strict
    assert instructions.verify(response, answer_of(*given, loose=True)).outcome == loose
    broken = [one for one in given if strict == "wrong" and alone(response, one) == "wrong"]
    assert all(name in verdict.reason for name, _ in broken) or "is empty" in verdict.reason


def alone(response: str, given: tuple[str, dict]) -> Outcome:
    return instructions.verify(response, answer_of(given)).outcome


def test_split_asks_for_each_alone_strict_and_loose() -> None:
    given = [("punctuation:no_comma", {}), ("startend:quotation", {})]
    parts = instructions.split(answer_of(*given))
    response = 'Sure, here:\n"quoted"'
    outcomes = [instructions.verify(response, part).outcome for part in parts]
    wrong, right = Outcome.WRONG, Outcome.CORRECT
    assert outcomes == [wrong, wrong, right, right]


def test_whole_numbers_may_be_written_as_parquet_has_them() -> None:
    arguments = {"num_paragraphs": 2.0, "nth_paragraph": 2.0, "first_word": "two"}
    answer = answer_of(("length_constraints:nth_paragraph_first_word", arguments))
    instructions.check_answer(answer)
    assert instructions.verify("One.\n\nTwo.", answer).outcome is Outcome.CORRECT


@pytest.mark.parametrize(
    ("answer", "named"),
    [
        ("no json", ["form"]),
        ('{"instructions": 3}', ["form"]),
        ('{"instructions": []}', ["empty"]),
        (answer_of(("punctuation:no_coma", {})), ["'punctuation:no_coma'", "punctuation:no_comma"]),
        (answer_of(("startend:end_checker", {})), ["startend:end_checker", "'end_phrase'"]),
        (answer_of(("punctuation:no_comma", {"x": 1})), ["punctuation:no_comma", "'x'"]),
        (
            answer_of(("length_constraints:number_words", {"num_words": 3, "relation": "at most"})),
            ["relation ('at most')", "less than, at least"],
        ),
    ],
)
def test_answers_that_make_no_sense_are_refused(answer: str, named: list[str]) -> None:
    with pytest.raises(DataError, match=mentions(*named)):
        instructions.verify("anything", answer)


@pytest.mark.skipif(not (DATA / "ifeval").exists(), reason=f"no {DATA}/ifeval")
def test_all_published_prompts_are_understood() -> None:
    benchmark = BENCHMARKS["ifeval"]
    problems = benchmark.load(*benchmark.find_files(DATA))
    assert len(problems) == 541
    used: set[str] = set()
    for problem in problems:
        parsed, loose = instructions.parse(problem.answers[0])
        used |= {name for name, _ in parsed}
        assert not loose
        # Every check runs with the published arguments, on the prompt itself.
        instructions.verify(problem.prompt, problem.answers[0])
    assert used == set(instructions._CHECKS)
