"""Reports of runs, from the files they leave."""

from gapo_megatron.report.picture import write_picture
from gapo_megatron.report.report import Report, write_report

__all__ = ["Report", "write_picture", "write_report"]
