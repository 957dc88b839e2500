"""Reports of runs, from the files they leave."""

from gapo_tools.reporting.report import Report, write_report

__all__ = ["Report", "write_report"]
