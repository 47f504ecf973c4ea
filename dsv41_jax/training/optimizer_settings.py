"""Settings of the optimizer and its schedule. The defaults are the report's, where it gives a number."""

import dataclasses

from dsv41_jax.settings import Settings, setting

DTYPES = ("float32", "bfloat16")


@dataclasses.dataclass(frozen=True)
class OptimizerSettings(Settings):
    """Checked settings; the metadata of each field has its help line.

    Raises:
        ValueError: naming the setting, its value and what is allowed. TypeError: a value of another kind.
    """

    peak_rate: float = setting(2.6e-4, "learning rate after the warm-up", least=0)
    final_rate: float = setting(2.6e-5, "learning rate after the decay", least=0)
    warmup_steps: int = setting(2000, "steps in which the rate rises from 0 to the peak", least=0)
    schedule_unit: str = setting("tokens", "what decay_start and decay_end count", choices=("tokens", "steps"))
    decay_start: float = setting(28e12, "where the rate begins to fall, along a cosine", least=0)
    decay_end: float = setting(40e12, "where it has fallen to the final rate", least=0)

    muon_momentum: float = setting(0.95, "momentum of Muon", least=0, most=1)
    matrix_decay: float = setting(0.1, "decoupled weight decay of what Muon trains", least=0)
    update_rms: float = setting(0.18, "root mean square of an update of Muon or Sinkhorn at rate 1", least=0)
    split_index_heads: bool = setting(True, "orthogonalise the indexer's queries per head (the report does not say)")
    newton_schulz_dtype: str = setting("float32", "of Muon's products; bfloat16 for accelerators", choices=DTYPES)
    momentum_dtype: str = setting("float32", "of Muon's and Sinkhorn's momentum, not of tables'", choices=DTYPES)

    sinkhorn_momentum: float = setting(0.95, "momentum of embeddings, head and Engram tables", least=0.01, most=0.9999)
    sinkhorn_steps: int = setting(11, "row and column normalisations, an odd number", least=1)
    sinkhorn_threshold: float = setting(1e-3, "rows whose norm is at most this part of the mean stay", least=0, most=1)
    embedding_rate: float = setting(1.0, "rate of embeddings and prediction heads, times the schedule's", least=0)
    table_rate: float = setting(5.0, "rate of Engram tables, times the schedule's", least=0)

    adam_momentum: float = setting(0.9, "first moment of AdamW", least=0, most=1)
    adam_second_momentum: float = setting(0.95, "second moment of AdamW", least=0, most=1)
    norm_decay: float = setting(0.1, "decoupled weight decay of norm weights", least=0)
    epsilon: float = setting(1e-20, "added to the divisors of every rule", least=0)
    adamw: tuple[str, ...] = setting((), "patterns of matrices that AdamW trains instead, as '*.hc_*.fn'")

    vision_rate: float = setting(0.1, "rate of the vision encoder, times the schedule's (not published)", least=0)

    clip_norm: float | None = setting(None, "largest global norm of the gradients (default: not clipped)", least=0)
    skip_spikes: bool = setting(False, "leave out steps whose loss or gradient norm is not finite or too high")
    spike_deviations: float = setting(8.0, "far above: this many standard deviations above the mean loss", least=0)
    spike_norm_ratio: float = setting(20.0, "far above: this many times the mean gradient norm", least=1)
    spike_window: int = setting(100, "steps that the running means look back; none is left out before", least=2)
    spike_limit: int = setting(10, "after so many in a row a finite step is taken all the same", least=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.decay_end < self.decay_start:
            raise ValueError(f"decay_end={self.decay_end!r}: at least decay_start={self.decay_start!r} is needed")
        if self.sinkhorn_steps % 2 == 0:
            raise ValueError(f"sinkhorn_steps={self.sinkhorn_steps!r}: an odd number is needed, to end on rows")
