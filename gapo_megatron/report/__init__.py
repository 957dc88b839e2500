"""Figures of a run, from the files it leaves."""

from gapo_megatron.report.report import write_report

__all__ = ["write_report"]
