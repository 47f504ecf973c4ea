"""What a trainer may choose about the cacheless forward. None of it changes what the trained model is."""

import dataclasses

from dsv41_jax.tiles import TEMPORARY_BYTES

REMAT = ("none", "layer", "full", "group")
INDEX_LOSS = ("none", "selected", "dense")


@dataclasses.dataclass(frozen=True)
class ForwardOptions:
    """Static under jit.

    Attributes:
        remat: what the backward pass finds stored. "none": everything. "layer": of each layer its inputs, its selection
            and what its attention returned (`kept_names`); the rest is computed again. "full": inputs and selection
            only. "group": as "full", and of a group of layers (an index source and those that reuse its selection) only
            the inputs of the first one; the others are computed twice more.
        candidates: the two-level candidate restriction of index sources (post-training; the report's pretraining has
            none).
        index_loss: the indexer's own loss, see `index_loss`: "selected" (of the selected entries), "dense" (of all
            visible ones, for short rows) or "none".
        rolled: equal consecutive layers share one traced body (`lax.scan`), which compiles faster and runs as fast.
        dense_tokens: rows of at most so many tokens attend to entries by a mask over all of them, longer ones gather
            those that are selected. Numbers are the same up to the order of sums.
        temporary_bytes: budget of the temporary arrays of scoring and attention in long rows.
        attention_inputs: also return the normed input of every layer's attention (needs remat "none", not rolled).
    """

    remat: str = "none"
    candidates: bool = True
    index_loss: str = "none"
    rolled: bool = True
    dense_tokens: int = 1024
    temporary_bytes: int = TEMPORARY_BYTES
    attention_inputs: bool = False

    def __post_init__(self):
        for name, allowed in (("remat", REMAT), ("index_loss", INDEX_LOSS)):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name}={getattr(self, name)!r} is unknown; choose one of {', '.join(allowed)}")
        if self.attention_inputs and (self.rolled or self.remat != "none"):
            raise ValueError('attention_inputs needs rolled=False and remat="none": they are kept for every layer')

    @property
    def kept_names(self) -> tuple[str, ...]:
        """Names of values (`jax.ad_checkpoint.checkpoint_name`) that remat keeps."""
        return ("selection", "attention") if self.remat == "layer" else ("selection",)


DEFAULT_OPTIONS = ForwardOptions()
