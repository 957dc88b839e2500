"""Reports of runs, from the files they leave."""

from gapo_megatron.ops.report.report import Report, write_report

__all__ = ["Report", "write_report"]
