"""Which part of a response is judged."""

from __future__ import annotations


def final_part(response: str) -> str:
    """What follows the thoughts, which `</think>` ends; nothing if they begin and never end."""
    _, ended, final = response.rpartition("</think>")
    return "" if "<think>" in response and not ended else final
