"""Which part of a response is judged."""

from __future__ import annotations


def final_part(response: str) -> str:
    """What follows the thoughts, which `</think>` ends, up to thoughts that begin and never end."""
    _, ended, final = response.rpartition("</think>")
    final, began, _ = final.partition("<think>")
    return "" if began and not ended else final
