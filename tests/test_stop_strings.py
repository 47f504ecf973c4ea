"""Stop strings: the text before the first match, however the text is cut into pieces."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsv41_jax.stop_strings import StopStrings, check_stops


def run(stops, pieces):
    """(text, found, what was let through piece by piece)."""
    filter_ = StopStrings(stops)
    out = [filter_.push(piece) for piece in pieces]
    out.append(filter_.flush())
    return "".join(out), filter_.found, out


def plain(stops, text):
    """The text before the match that is complete first; of those, the longest."""
    for end in range(1, len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return text[: min(starts)], True
    return text, False


@given(
    st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=3),
    st.text("ab\n", max_size=20),
    st.lists(st.integers(0, 20), max_size=6),
)
def test_equals_a_plain_version_for_any_cut(stops, text, cuts):
    at = [0, *sorted(cuts), len(text)]
    for pieces in ([text], list(text), [text[a:b] for a, b in zip(at, at[1:], strict=False)]):
        joined, found, _ = run(stops, pieces)
        assert (joined, found) == plain(stops, text)


def test_only_what_may_begin_a_stop_is_held_back():
    assert run(["\n\nQ:"], ["a", "\n", "b", "\n", "\n", "Q", "x", "\n\nQ", ":", "y"])[2] == [
        *("a", "", "\nb", "", "", "", "\n\nQx", "", "", "", "")
    ]
    assert run(["END"], ["xE", "N"])[2] == ["x", "", "EN"]  # let through at the end
    assert run([], ["a", "b"])[2] == ["a", "b", ""]
    assert run(["🌊!"], ["🌊", "?"])[2] == ["", "🌊?", ""]
    assert run(["b"], ["abc", "d"]) == ("a", True, ["a", "", ""])


def test_stops_are_checked():
    assert check_stops("x") == ("x",) and check_stops(["x", "yz"]) == ("x", "yz") and check_stops(()) == ()
    for bad, message in (
        ("", r"^stop\[0\] is ''"),
        (["a", ""], r"^stop\[1\] is ''"),
        ([3], r"^stop\[0\] is 3"),
        (5, "^stop=5"),
        (None, "^stop=None"),
        ("a\udc80", "lone surrogate"),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            check_stops(bad)
