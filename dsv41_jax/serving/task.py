"""One request inside the engine, from the queue to its last token."""

import dataclasses

import numpy as np

from dsv41_jax.engram_hash import DEAD, EngramHasher
from dsv41_jax.image_input import prompt_token_types
from dsv41_jax.image_plan import TokenType
from dsv41_jax.prompt_reading import Reading
from dsv41_jax.runner import Runner
from dsv41_jax.serving.request import GenerationRequest


@dataclasses.dataclass(eq=False)
class Task:
    """A request and how far it has come.

    Attributes:
        number: order of arrival. submitted: `time.monotonic()` then. rank: smaller runs first; see `scheduler`.
        row: where it runs, or None while it waits. pages: those it holds, ids within the row's device.
        output: tokens drawn so far; outlives a stay in a row. fed: how many of them the cache holds.
        blocks: what is still to be read of the prompt, [(layers, first token, end)]. fresh: whether the logits of the
            next token are there.
        last_token: when the last token came. spans: embeddings of images, made once.
    """

    request: GenerationRequest
    number: int
    submitted: float
    rank: tuple = ()
    row: int | None = None
    pages: list[int] = dataclasses.field(default_factory=list)
    reserved: int = 0
    output: list[int] = dataclasses.field(default_factory=list)
    fed: int = 0
    blocks: list[tuple[str, int, int]] = dataclasses.field(default_factory=list)
    fresh: bool = False
    last_token: float | None = None
    spans: list[np.ndarray] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        self.prompt_length = len(self.request.token_ids)
        self.reading: Reading | None = None
        self._ids: np.ndarray | None = None
        self._compressed: np.ndarray | None = None
        self._image_mask: np.ndarray | None = None

    @property
    def id(self) -> str:
        return self.request.request_id

    @property
    def is_reading(self) -> bool:
        """In a row, and not through with its prompt."""
        return self.row is not None and (bool(self.blocks) or len(self.spans) < len(self.request.images))

    @property
    def feeds(self) -> bool:
        """In a row, with a token that the cache does not hold yet."""
        return self.row is not None and not self.is_reading and not self.fresh and self.fed < len(self.output)

    @property
    def length(self) -> int:
        """Tokens in the cache once the prompt is read."""
        return self.prompt_length + self.fed

    def begin(self, runner: Runner, block: int) -> None:
        """Ready to be read into its row. A task that begins again reads the same prompt, split at the same token. Its
        output is fed token by token where the result must be the same to the last bit, else read with the prompt.
        """
        request, config = self.request, runner.config
        mode = "ced" if config.supports_ced else "exact"
        reading = Reading.of(config, mode, self.prompt_length)
        again = 0 if request.batch_invariant else len(self.output)
        self.reading = dataclasses.replace(reading, end=self.prompt_length + again)
        self.blocks = list(self.reading.blocks(block))
        self.fed, self.fresh = again, False
        self._ids = np.concatenate([request.token_ids, self.output[:again]]).astype(np.int32)
        mask = None
        if request.images:
            mask = prompt_token_types([request.images], len(self._ids), config)[0] != TokenType.TEXT
        self._image_mask = mask
        if runner.hasher is not None:
            self._compressed = runner.hasher.compress(self._ids[None], None if mask is None else mask[None])

    def leave(self) -> None:
        """Out of its row: what can be made again is let go."""
        self.row, self.pages, self.reserved, self.blocks, self.fresh, self.fed = None, [], 0, [], False, 0
        self._ids = self._compressed = self._image_mask = None

    def ids(self, first: int, stop: int, size: int) -> np.ndarray:
        """int32 [1, size]: tokens first .. stop - 1 of what is read, the last one repeated."""
        return self._ids[_places(first, stop, size)][None]

    def engram_rows(self, hasher: EngramHasher, first: int, stop: int, size: int) -> np.ndarray:
        """Table rows int32 [layers, 1, size, columns] of the same tokens."""
        block = self._compressed[:, _places(first, stop, size)]
        return hasher.hash(block, self._history(hasher, first))

    def history(self, hasher: EngramHasher) -> np.ndarray:
        """Compressed ids int64 [1, look-back] of the last tokens that were read."""
        return self._history(hasher, len(self._ids))

    def _history(self, hasher: EngramHasher, end: int) -> np.ndarray:
        before = self._compressed[:, max(end - hasher.lookback, 0) : end]
        return np.pad(before, ((0, 0), (hasher.lookback - before.shape[1], 0)), constant_values=DEAD)

    def image_part(self, first: int, stop: int, size: int, width: int) -> tuple[np.ndarray, np.ndarray] | None:
        """Image positions bool [1, size] and embeddings [1, size, D] of the same tokens; None if none is an image's."""
        if self._image_mask is None or not self._image_mask[first:stop].any():
            return None
        places = _places(first, stop, size)
        embeds = np.zeros((size, width), self.spans[0].dtype)
        for image, span in zip(self.request.images, self.spans, strict=True):
            inside = (places >= image.start) & (places < image.start + len(span))
            embeds[inside] = span[places[inside] - image.start]
        return self._image_mask[places][None], embeds[None]


def _places(first: int, stop: int, size: int) -> np.ndarray:
    return np.minimum(np.arange(first, first + size), stop - 1)
