"""What a training run is told: the fields of `configs/*_pretraining.py`."""

import dataclasses

from dsv41_jax.forward_options import INDEX_LOSS, REMAT, ForwardOptions
from dsv41_jax.numerics import FLOAT32, NOQUANT, QUANTIZED_TRAINING, QUANTIZED_TRAINING_BF16, Numerics
from dsv41_jax.settings import Settings, section, setting
from dsv41_jax.training.data_settings import DataSettings, SourceSettings
from dsv41_jax.training.objective import Objective
from dsv41_jax.training.optimizer_settings import OptimizerSettings
from dsv41_jax.training.state import STAGES

FRESH = "fresh:"  # before the configuration of a model that begins with fresh weights
# With the quantisation points of the release, and before `quantize_from` without them.
NUMERICS: dict[str, tuple[Numerics, Numerics]] = {
    "quantized": (QUANTIZED_TRAINING, FLOAT32),
    "quantized_bf16": (QUANTIZED_TRAINING_BF16, NOQUANT),
    "float32": (FLOAT32, FLOAT32),
    "bfloat16": (NOQUANT, NOQUANT),
}


@dataclasses.dataclass(frozen=True)
class CheckpointSettings(Settings):
    """When checkpoints are written, and which are kept."""

    every_steps: int = setting(500, "steps between checkpoints; 0: by time only", least=0)
    every_minutes: float = setting(0.0, "minutes between checkpoints; 0: by steps only", least=0)
    keep: int = setting(3, "newest checkpoints that are kept")
    keep_every: int | None = setting(None, "checkpoints of every so many steps are kept for good")
    background: bool = setting(True, "write while training goes on")


@dataclasses.dataclass(frozen=True)
class EvaluationSettings(Settings):
    """Held-out text."""

    sources: tuple[SourceSettings, ...] = setting((), "held-out documents, as the training data's; none: no evaluation")
    every_steps: int = setting(500, "steps between evaluations; there is one at the end too")
    rows: int = setting(32, "rows of the training length that are evaluated")
    ced_rows: int = setting(
        4,
        "of those, how many also run through the cache: encoder-only prefill of half the row, then the rest; 0: none",
        least=0,
    )


@dataclasses.dataclass(frozen=True)
class TrainSettings(Settings):
    """Checked settings of a run; the metadata of each field has its help line.

    Raises:
        ValueError: naming the setting, its value and what is allowed. TypeError: a value of another kind.
    """

    model: str = setting("demo", '"demo", a released-format folder, an Orbax folder, a hub id, or fresh:CONFIG')
    revision: str | None = setting(None, "of a hub id: a branch, tag or commit")
    tokenizer: str | None = setting(None, "of a fresh model: folder with tokenizer.json or token_map.npy")
    run: str = setting("", "folder of the run: checkpoints, log; the same folder goes on where it stopped")
    export: str | None = setting(None, "folder for the finished model in the released format; must not hold one yet")
    stage: str = setting("backbone", "what is trained: the model, the drafter on it, or both", choices=STAGES)
    steps: int = setting(1000, "steps of the run")
    accumulate: int = setting(1, "a batch is worked on in so many parts, whose gradients are summed")
    seed: int = setting(0, "of fresh weights and of the places where drafts begin", least=0)
    mesh: str | None = setting(None, "spread over all devices: DATAxCONTEXTxTENSOR (default: one device)")

    numerics: str = setting("quantized", "of the forward pass; master weights are float32", choices=tuple(NUMERICS))
    quantize_from: int = setting(0, "steps that run without quantisation before the others", least=0)
    unquantized: tuple[str, ...] = setting((), "quantisation points that stay off, see numerics.py")
    candidates: bool = setting(True, "restrict index sources to candidate blocks (post-training; off before)")
    index_loss: str = setting("selected", "the indexers' own loss: of selected or of all entries", choices=INDEX_LOSS)
    remat: str = setting("none", "what the backward pass computes again", choices=REMAT)
    rolled: bool = setting(False, "compile equal layers once: for large models")

    objective: Objective = section(Objective, "weights of the losses")
    optimizer: OptimizerSettings = section(OptimizerSettings, "rules and learning rate")
    data: DataSettings | None = setting(None, "what is read")
    checkpoint: CheckpointSettings = section(CheckpointSettings, "when the state is saved")
    evaluation: EvaluationSettings = section(EvaluationSettings, "held-out text")

    log_every: int = setting(10, "steps between lines of the log")
    tensorboard: bool = setting(True, "write event files for TensorBoard too")

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("model", "run"):
            if not getattr(self, name):
                raise ValueError(f"{name}='': a name or a folder is needed")
        if self.data is None:
            raise ValueError("data=None: a section that says what to read is needed")
        if self.data.batch % self.accumulate:
            raise ValueError(f"accumulate={self.accumulate}: data.batch={self.data.batch} rows are no multiple of it")
        self.numerics_at(self.quantize_from)  # unknown points

    def numerics_at(self, step: int) -> Numerics:
        """Of the step that follows `step` finished ones."""
        quantized, plain = NUMERICS[self.numerics]
        return plain if step < self.quantize_from else quantized.without(self.unquantized)

    @property
    def options(self) -> ForwardOptions:
        """Of the forward pass."""
        return ForwardOptions(
            remat=self.remat, candidates=self.candidates, index_loss=self.index_loss, rolled=self.rolled
        )
