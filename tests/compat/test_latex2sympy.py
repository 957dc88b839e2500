"""The faster prediction of math-verify's parser reads what the thorough one reads."""

from __future__ import annotations

import pytest
import sympy
from antlr4.atn.ParserATNSimulator import ParserATNSimulator
from latex2sympy2_extended.latex2sympy2 import ConversionConfig, latex2sympy

from gapo_megatron.compat.latex2sympy import parse_latex

READ = [r"x+1", r"\sqrt{2}+\sin x", "(1,2)", "2x", r"\frac{1}{R-r}", r"\{1,2\}", "x=5"]
LEFT = ["x^2+2x+1", "x^2+2x"]
"""What only the thorough prediction reads."""


def _theirs(text: str) -> object:
    config = ConversionConfig(lowercase_symbols=False)
    return latex2sympy(text, is_real=True, normalization_config=None, conversion_config=config)


@pytest.mark.parametrize("text", READ + LEFT)
def test_both_predictions_read_the_same(text: str) -> None:
    ours = parse_latex(text, lowercase_symbols=False)
    assert sympy.srepr(ours) == sympy.srepr(_theirs(text))


def test_letters_lose_their_case_on_request() -> None:
    assert parse_latex("R-r", lowercase_symbols=True).doit() == 0


@pytest.mark.parametrize("text", ["1+", r"\frac{1}{}", ")("])
def test_what_cannot_be_read_is_an_error_of_both(text: str) -> None:
    with pytest.raises(Exception, match=r".") as theirs:
        _theirs(text)
    with pytest.raises(Exception, match=r".") as ours:
        parse_latex(text, lowercase_symbols=False)
    assert str(ours.value) == str(theirs.value)


def test_the_thorough_prediction_is_for_the_rest_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    texts: list[str] = []
    original = ParserATNSimulator.execATNWithFullContext

    def counted(simulator, *args):  # type: ignore[no-untyped-def]
        texts.append(text)
        return original(simulator, *args)

    monkeypatch.setattr(ParserATNSimulator, "execATNWithFullContext", counted)
    for text in READ + LEFT:
        parse_latex(text, lowercase_symbols=False)
    assert set(texts) == set(LEFT)
