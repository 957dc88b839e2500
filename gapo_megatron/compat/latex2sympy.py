"""math-verify's parser of LaTeX, with ANTLR's faster prediction where that is enough."""

from __future__ import annotations

from typing import Any

from antlr4.atn.PredictionMode import PredictionMode  # type: ignore[import-untyped]
from latex2sympy2_extended.latex2sympy2 import ConversionConfig, _Latex2Sympy


class _TwoStages(_Latex2Sympy):
    def create_parser(self, latex_str: str) -> Any:
        parser = super().create_parser(latex_str)
        parser._interp.predictionMode = self.mode
        return parser

    def parse(self, latex_str: str) -> Any:
        self.mode = PredictionMode.SLL
        try:
            return super().parse(latex_str)
        except Exception:  # of a syntax error it raises just that, of a bad value anything
            self.mode = PredictionMode.LL
            return super().parse(latex_str)


def parse_latex(text: str, *, lowercase_symbols: bool) -> Any:
    """Return what `latex2sympy` returns, of real letters and normalised text, in less time.

    SLL prediction gives the tree that LL prediction does, or an error of syntax (ANTLR's
    `PredictionMode`); then LL decides. What LL finds out by the context it finds out anew for every
    text, which is most of the time of parsing.

    Args:
        text: as `normalize_latex` returns it.
        lowercase_symbols: whether R and r are one letter.

    Raises:
        Exception: as `latex2sympy`.
    """
    # Uses: latex2sympy2._Latex2Sympy and its create_parser, _interp of ANTLR's parser
    # Versions: latex2sympy2-extended 1.11.0, with antlr4-python3-runtime 4.13.2
    # Upstream: none found
    config = ConversionConfig(lowercase_symbols=lowercase_symbols)
    return _TwoStages(is_real=True, convert_degrees=False, config=config).parse(text)


__all__ = ["parse_latex"]
