"""A page of what the model did, token by token (tools/view.py)."""

from gapo_tools.viewer.data import RunData, has_samples, read_data
from gapo_tools.viewer.page import make_page

__all__ = ["RunData", "has_samples", "make_page", "read_data"]
