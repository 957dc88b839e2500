"""Checkpoints that survive a kill at any moment, and resume onto any parallel layout."""

from gapo_megatron.checkpoint.branch import BranchPoint, begin_branch, check_branch, record_branch
from gapo_megatron.checkpoint.open_step import OpenStep
from gapo_megatron.checkpoint.resume import LoadedState, check_resume, load_latest
from gapo_megatron.checkpoint.save import save

__all__ = [
    "BranchPoint",
    "LoadedState",
    "OpenStep",
    "begin_branch",
    "check_branch",
    "check_resume",
    "load_latest",
    "record_branch",
    "save",
]
