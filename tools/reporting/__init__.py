"""Reports of runs, from the files they leave."""

from tools.reporting.report import Report, write_report

__all__ = ["Report", "write_report"]
