"""The part of a response that is judged."""

from __future__ import annotations


def final_part(response: str) -> str:
    """Return the text after the last `</think>`, up to a `<think>` that is never closed."""
    _, ended, final = response.rpartition("</think>")
    final, began, _ = final.partition("<think>")
    return "" if began and not ended else final
