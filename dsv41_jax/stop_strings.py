"""Strings that end a text, found while the text arrives in pieces."""

from collections.abc import Sequence

from dsv41_jax.arguments import check_text


def check_stops(stop: str | Sequence[str]) -> tuple[str, ...]:
    """One stop string or several as a tuple: TypeError for anything else, ValueError for an empty one."""
    if isinstance(stop, str):
        stop = (stop,)
    if not isinstance(stop, list | tuple):
        raise TypeError(f"stop={stop!r}: a string or a list of strings is needed")
    return tuple(check_text(f"stop[{i}]", text) for i, text in enumerate(stop))


class StopStrings:
    """Pieces of text in, the text before the first stop string out.

    The first is the one that is complete first, so how the text is cut into pieces makes no difference. An end of the
    text so far that may be the beginning of a stop string is held back until it is certain.

    Attributes:
        found: whether a stop string came; nothing is let through after it.
    """

    def __init__(self, stops: Sequence[str]):
        self._stops = tuple(stops)
        self._held = ""
        self.found = False

    def push(self, piece: str) -> str:
        """The text that this piece makes certain."""
        if self.found:
            return ""
        text = self._held + piece
        ends = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if ends:
            self.found, self._held = True, ""
            return text[: min(ends)[1]]
        certain = len(text) - self._beginning(text)
        self._held = text[certain:]
        return text[:certain]

    def flush(self) -> str:
        """End of the text: what was held back."""
        held, self._held = self._held, ""
        return held

    def _beginning(self, text: str) -> int:
        """Length of the longest end of the text that begins a stop string."""
        longest = min(len(text), max(map(len, self._stops), default=1) - 1)
        for n in range(longest, 0, -1):
            if any(stop.startswith(text[-n:]) for stop in self._stops):
                return n
        return 0
