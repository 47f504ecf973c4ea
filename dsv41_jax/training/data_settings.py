"""What the data pipeline is told: the `data` section of a training config."""

import dataclasses

from dsv41_jax.settings import Settings, setting


@dataclasses.dataclass(frozen=True)
class SourceSettings(Settings):
    """One source of documents."""

    path: str = setting("", "folder or pattern of .array_record shards, or one .npy file of BOS-separated tokens")
    weight: float = setting(1.0, "share of the tokens, relative to the other sources", least=0)
    name: str = setting("", "name in messages and statistics (default: the path)")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.path:
            raise ValueError("path='': a file or a folder is needed")
        if self.weight == 0:
            raise ValueError(f"weight=0 of {self.path}: a positive number is needed; leave the source out instead")


@dataclasses.dataclass(frozen=True)
class DataSettings(Settings):
    """Which documents, in which order, as which batches.

    Raises:
        ValueError: naming the setting, its value and what is allowed. TypeError: a value of another kind.
    """

    sources: tuple[SourceSettings, ...] = setting((), "where documents come from: a list of path, weight, name")
    batch: int = setting(8, "rows of a batch, over all processes together")
    length: int = setting(4096, "tokens of a row")
    seed: int = setting(0, "of the orders and of the replay draws", least=0, most=2**32 - 1)
    shuffle: bool = setting(True, "visit the documents of a source in a random order, another one every epoch")
    epochs: int = setting(0, "how often each source is read; 0: again and again", least=0)
    split: str = setting(
        "fill",
        "fill: documents are split rather than rows padded; none: only documents longer than a row are split",
        choices=("fill", "none"),
    )
    open_rows: int = setting(64, "rows that documents are fitted into at once")
    mixed_rows: int = setting(256, "full rows that wait, from which the next is drawn at random; 0: in order", least=0)
    add_bos: bool = setting(True, "BOS before each stored document")
    add_eos: bool = setting(True, "EOS behind each stored document")
    on_corrupt: str = setting(
        "stop",
        "a record that cannot be read stops the run, or is counted and skipped",
        choices=("stop", "skip"),
    )
    prompt_loss: bool = setting(True, "whether the tokens of prompts are targets")
    replay_prompts: bool = setting(False, "simulate decoder replay at the end of each stored prompt")
    replay_probability: float = setting(
        0.0, "share of the other samples that are given a random prompt length, for replay", least=0, most=1
    )
    images_per_row: int = setting(0, "most images of a row; 0: no images", least=0)
    image_patches: int = setting(0, "most ViT patches of an image; 0: of the largest that the model takes", least=0)
    prefetch: int = setting(2, "batches made ahead in a thread; 0: none", least=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.sources:
            raise ValueError("sources=(): at least one source is needed")

    @property
    def simulates_replay(self) -> bool:
        """Whether batches have `replay` floors."""
        return self.replay_prompts or self.replay_probability > 0
