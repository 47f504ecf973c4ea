"""Which rule trains which parameter: one table of patterns, and the report of it that a run prints at its start.

What the report leaves open is decided here, and `OptimizerSettings.adamw` can move any matrix to AdamW:

* hyper-connection matrices `hc_*.fn`, router weights, the indexer's head weights and the confidence head are matrices
  and go to Muon: V4 lists only the static biases and the gates of hyper-connections under AdamW;
* the drafter's Markov embedding and head are like an embedding and a prediction head: Sinkhorn;
* keys have one head in this model, so `wkv` and `wk` are whole; the vision encoder's `wqkv` is cut into q, k and v;
* the output projection `wo_a`, which acts on groups of heads apart, is one matrix, as it is stored.
"""

import dataclasses
import fnmatch
import functools
import math

from dsv41_jax.checkpoint.names import flatten, name_map, nest
from dsv41_jax.config import ModelConfig
from dsv41_jax.training.optimizer_settings import OptimizerSettings

# First match of the dotted path wins.
RULES: tuple[tuple[str, str], ...] = (
    ("*.gate.bias", "frozen"),  # router biases have a rule of their own, see training/balance.py
    ("*.gate.bias_vl", "frozen"),
    ("engram.*.embed.weight", "table"),
    ("embed.weight", "sinkhorn"),
    ("head.weight", "sinkhorn"),
    ("mtp.markov_head.*.weight", "sinkhorn"),
    ("*norm.weight", "norm"),
    ("*.norm?.weight", "norm"),  # of the vision encoder
    ("engram.*.?_weight", "norm"),  # gains of its two normalisations
    ("*.bias", "vector"),
    ("*.hc_*.base", "vector"),
    ("*.hc_*.scale", "vector"),
    ("*.attn_sink", "vector"),
    ("image_*", "vector"),
    ("*.hc_*.fn", "muon"),
    ("*.weight", "muon"),
)
WAITING = "vision.*"  # trains from the start of the decay of the rate on, except
NOT_WAITING = "vision.norm.weight"

TITLES = {
    "muon": "Muon",
    "sinkhorn": "Sinkhorn-balanced momentum",
    "table": "Sinkhorn-balanced momentum on sparse rows",
    "norm": "AdamW, norm weights",
    "vector": "AdamW, no decay",
    "frozen": "not by gradients (router biases follow the loads)",
}


@dataclasses.dataclass(frozen=True)
class Rule:
    """kind: a key of TITLES. waits: only once the rate decays, at `OptimizerSettings.vision_rate`."""

    kind: str
    waits: bool

    @property
    def label(self) -> str:
        """A name of the group, for `optax.partition`."""
        return f"waiting {self.kind}" if self.waits else self.kind

    def rate(self, settings: OptimizerSettings) -> float:
        """Times the schedule's."""
        if self.kind == "frozen":
            return 0.0
        of_kind = {"sinkhorn": settings.embedding_rate, "table": settings.table_rate}
        return (settings.vision_rate if self.waits else 1.0) * of_kind.get(self.kind, 1.0)

    def decay(self, settings: OptimizerSettings) -> float:
        """Decoupled weight decay."""
        return {"muon": settings.matrix_decay, "norm": settings.norm_decay}.get(self.kind, 0.0)


def rule_of(name: str, settings: OptimizerSettings) -> Rule:
    """The rule of a parameter by its dotted path.

    Raises:
        ValueError: no pattern matches.
    """
    kind = next((kind for pattern, kind in RULES if fnmatch.fnmatchcase(name, pattern)), None)
    if kind is None:
        raise ValueError(f"params.{name}: no optimizer rule matches; add one to RULES in training/rules.py")
    if kind in ("muon", "sinkhorn") and any(fnmatch.fnmatchcase(name, pattern) for pattern in settings.adamw):
        kind = "vector"
    return Rule(kind, fnmatch.fnmatchcase(name, WAITING) and name != NOT_WAITING)


def labels(params: dict, settings: OptimizerSettings) -> dict:
    """A tree of group names, one for each parameter."""
    return nest({path: rule_of(".".join(path), settings).label for path, _ in flatten(params)})


def slices_of(name: str, config: ModelConfig, settings: OptimizerSettings) -> int:
    """Into how many equal parts of rows Muon cuts the matrices of a parameter."""
    if name.endswith(".attn.wq_b.weight"):
        return config.num_attention_heads
    if name == "indexers.wq_b.weight" and settings.split_index_heads:
        return config.index_n_heads
    return 3 if name == "vision.blocks.attn.wqkv.weight" else 1


def check_patterns(config: ModelConfig, settings: OptimizerSettings) -> None:
    """ValueError for a pattern of `settings.adamw` that names no matrix of the model: it would silently do nothing."""
    plain = dataclasses.replace(settings, adamw=())
    names = [name for name in _names(config) if rule_of(name, plain).kind in ("muon", "sinkhorn")]
    for pattern in settings.adamw:
        if not fnmatch.filter(names, pattern):
            raise ValueError(f"adamw={settings.adamw!r}: {pattern!r} is no matrix of this model; they are {names}")


@functools.lru_cache(maxsize=8)
def _names(config: ModelConfig) -> tuple[str, ...]:
    paths = (".".join(path) for path in name_map(config).leaves)
    return tuple(name for name in paths if not name.endswith(".scale") or ".hc_" in name)


# The report


@dataclasses.dataclass(frozen=True)
class RuleRow:
    """A parameter and how it is trained.

    group: title of its rule. path: dotted. shape, parameters: of the whole leaf. rate: times the schedule's. matrices:
    those updated independently of each other (0: numbers by themselves).
    """

    group: str
    path: str
    shape: tuple[int, ...]
    parameters: int
    rate: float
    decay: float
    matrices: int


def rules_table(params: dict, config: ModelConfig, settings: OptimizerSettings) -> list[RuleRow]:
    """A row for every parameter of a tree (arrays or shapes, Engram tables too), group by group."""
    found = []
    for path, leaf in flatten(params):
        name, shape = ".".join(path), tuple(leaf.shape)
        rule = rule_of(name, settings)
        title = TITLES[rule.kind] + (", from the decay of the rate on" if rule.waits else "")
        matrices = 0
        if rule.kind == "muon":
            matrices = math.prod(shape[:-2]) * slices_of(name, config, settings)
        elif rule.kind in ("sinkhorn", "table"):
            matrices = 1
        order = (rule.waits, list(TITLES).index(rule.kind))
        row = RuleRow(title, name, shape, math.prod(shape), rule.rate(settings), rule.decay(settings), matrices)
        found.append((order, row))
    return [row for _, row in sorted(found, key=lambda pair: pair[0])]


def format_rules(rows: list[RuleRow]) -> str:
    """The table as text: a line a parameter under a heading for each group."""
    lines: list[str] = []
    wide = max((len(row.path) for row in rows), default=0)
    for group in dict.fromkeys(row.group for row in rows):
        own = [row for row in rows if row.group == group]
        lines.append(f"{group}: {len(own)} tensors, {sum(row.parameters for row in own):,} parameters")
        for row in own:
            shape = "x".join(map(str, row.shape))
            count = f"{row.matrices} matrices" if row.matrices > 1 else ""
            lines.append(
                f"  {row.path:<{wide}}  {shape:>20}  {row.parameters:>15,}  "
                f"rate x{row.rate:<5g} decay {row.decay:<5g} {count}".rstrip()
            )
    return "\n".join(lines)
