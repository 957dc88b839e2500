"""Checkpoints that survive a kill at any moment, and resume onto any parallel layout."""

from gapo_megatron.checkpoint.branch import BranchPoint, begin_branch, check_branch, record_branch
from gapo_megatron.checkpoint.open_step import OpenStep
from gapo_megatron.checkpoint.resume import check_resume, load_latest, newest_source
from gapo_megatron.checkpoint.save import Saving, begin_save, save
from gapo_megatron.checkpoint.shards import Room
from gapo_megatron.checkpoint.state import State

__all__ = [
    "BranchPoint",
    "OpenStep",
    "Room",
    "Saving",
    "State",
    "begin_branch",
    "begin_save",
    "check_branch",
    "check_resume",
    "load_latest",
    "newest_source",
    "record_branch",
    "save",
]
