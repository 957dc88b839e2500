"""A missing program or package is a skip that says so, or an error where it has to be there."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests import needs


@pytest.mark.parametrize(
    ("given", "ends", "ends_by_hand"),
    [("", "skip", "skip"), ("1", "fail", "skip"), ("all", "fail", "fail")],
)
def test_a_skip_is_an_error_where_everything_is_installed(
    monkeypatch: pytest.MonkeyPatch, given: str, ends: str, ends_by_hand: str
) -> None:
    monkeypatch.setattr(needs, "_GIVEN", given)
    kinds = {"skip": pytest.skip.Exception, "fail": pytest.fail.Exception}

    def check(call: Callable[[str], None], missing: str, kind: str) -> None:
        # Not `pytest.raises` alone: a skip that it does not expect would skip this test.
        with pytest.raises((pytest.skip.Exception, pytest.fail.Exception)) as caught:
            call(missing)
        assert caught.type is kinds[kind] and missing in str(caught.value)

    check(needs.need, "no_such_program", ends)
    check(needs.by_hand, "no_such_package", ends_by_hand)
    needs.need("")
    needs.by_hand("json")
