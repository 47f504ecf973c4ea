"""What a text call returns, and how the tokens of one row become its text."""

import dataclasses
from collections.abc import Sequence
from typing import Literal, NamedTuple

from dsv41_jax.stop_strings import StopStrings
from dsv41_jax.tokenizer import StreamDecoder, Tokenizer

FinishReason = Literal["stop", "length"]


@dataclasses.dataclass(frozen=True)
class TokenLogprob:
    """Log probability (nats) of a chosen token, and of the likeliest tokens there.

    They are the model's own: of the distribution before penalties, bias, temperature and filters. `top` holds (token
    id, log probability) pairs, the likeliest first; the chosen token need not be among them.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


class GeneratedToken(NamedTuple):
    """One token of one row, as the loops that generate yield it."""

    row: int
    token_id: int
    logprob: TokenLogprob | None = None


@dataclasses.dataclass(frozen=True)
class Completion:
    """One finished text.

    Attributes:
        text: the new text, without what ended it.
        token_ids: the tokens in the order they were drawn, without the stop token. Those of a stop string are in it.
        finish_reason: "stop" (a stop token or a stop string) or "length" (max_new_tokens).
        logprobs: one for each of token_ids, where they were asked for.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    logprobs: tuple[TokenLogprob, ...] | None = None


class TextRow:
    """Collects the tokens of one row; a character whose last bytes never come is left out.

    Attributes:
        ended: whether a stop string came.
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str]):
        self._decoder, self._stops = StreamDecoder(tokenizer), StopStrings(stops)
        self._pieces: list[str] = []
        self._tokens: list[GeneratedToken] = []

    @property
    def ended(self) -> bool:
        return self._stops.found

    def push(self, token: GeneratedToken) -> str:
        """The text that this token makes certain."""
        self._tokens.append(token)
        return self._add(self._stops.push(self._decoder.push(token.token_id)))

    def flush(self) -> str:
        """End of the row: the text held back because it might have begun a stop string."""
        return self._add(self._stops.flush())

    def completion(self, max_new_tokens: int, logprobs: bool) -> Completion:
        """The whole, after `flush`."""
        full = len(self._tokens) == max_new_tokens and not self.ended
        return Completion(
            text="".join(self._pieces),
            token_ids=tuple(token.token_id for token in self._tokens),
            finish_reason="length" if full else "stop",
            logprobs=tuple(token.logprob for token in self._tokens) if logprobs else None,
        )

    def _add(self, piece: str) -> str:
        self._pieces.append(piece)
        return piece
