"""math-verify's LaTeX parser, with ANTLR's faster prediction mode if that is enough."""

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
        except Exception:  # plain Exception on a syntax error, any other on a bad value
            self.mode = PredictionMode.LL
            return super().parse(latex_str)


def parse_latex(text: str, *, lowercase_symbols: bool) -> Any:
    """Parse like `latex2sympy`, for normalised text with real symbols, but faster.

    SLL prediction gives the same tree as LL prediction or a syntax error (ANTLR's
    `PredictionMode`); after an error LL decides. LL analyses the context anew for every text, which
    takes most of the parsing time.

    Args:
        text: result of `normalize_latex`.
        lowercase_symbols: treat R and r as the same symbol.

    Raises:
        Exception: like `latex2sympy`.
    """
    # Uses: latex2sympy2._Latex2Sympy and its create_parser, _interp of ANTLR's parser
    # Versions: latex2sympy2-extended 1.11.0, with antlr4-python3-runtime 4.13.2
    # Upstream: none found
    config = ConversionConfig(lowercase_symbols=lowercase_symbols)
    return _TwoStages(is_real=True, convert_degrees=False, config=config).parse(text)


__all__ = ["parse_latex"]
