"""What a training step minimises: next token, balance of the experts, the indexers' own loss, and the drafter's."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array

from dsv41_jax import model, quant
from dsv41_jax.config import ModelConfig
from dsv41_jax.forward_options import ForwardOptions
from dsv41_jax.numerics import Numerics
from dsv41_jax.router_notes import TokenFacts
from dsv41_jax.settings import Settings, setting
from dsv41_jax.training.balance import BIAS_SPEED, token_facts
from dsv41_jax.training.draft_rounds import DraftRounds
from dsv41_jax.training.image_embeds import image_embeds
from dsv41_jax.training.loss import draft_loss
from dsv41_jax.training.token_loss import summed_nats

Total = Callable[[Array], Array]  # sums a number over the devices that have other rows


def _alone(x: Array) -> Array:
    return x


@dataclasses.dataclass(frozen=True)
class Objective(Settings):
    """Weights of the parts; the defaults are the report's where it gives one."""

    balance_weight: float = setting(1e-4, "of the sequence balance loss", least=0)
    index_weight: float = setting(1.0, "of the indexers' own loss, which trains nothing else", least=0)
    bias_speed: float = setting(BIAS_SPEED, "how far a router bias moves in a step", least=0)
    anchors: int = setting(24, "draft rounds of each row of a step, at random places")


def forward_batch(
    config: ModelConfig,
    numerics: Numerics,
    options: ForwardOptions,
    params: dict,
    rows: dict[str, Array],
    batch: dict,
    facts: TokenFacts | None = None,
) -> tuple[Array, dict]:
    """`model.forward` of a batch, its images included.

    Args:
        rows: float32 Engram rows {"l<L>": [B, T, columns, width]} as the tables hold them; rounded here through the
            format that tables are stored in, where that is simulated.
    """
    if numerics.quantizes("tables"):
        rows = {name: quant.fake_quantize_weight("fp8_rows", value) for name, value in rows.items()}
    mask, embeds = batch.get("image_mask"), None
    if mask is not None:
        embeds = image_embeds(config, numerics, params, batch["images"], mask.shape)
    return model.forward(
        config,
        numerics,
        params,
        batch["token_ids"],
        rows,
        batch["segment_ids"],
        image_mask=mask,
        image_embeds=embeds,
        replay=batch.get("replay"),
        facts=facts,
        options=options,
    )


@dataclasses.dataclass(frozen=True)
class Losses:
    """The losses of a model on a batch (see `batches`).

    Attributes:
        stage: see `state.STAGES`.
        parts: a step is made of so many batches; means of a batch count for one part of the step's.
        total: adds up what devices with other rows have.
    """

    config: ModelConfig
    numerics: Numerics
    options: ForwardOptions
    objective: Objective
    stage: str
    parts: int = 1
    total: Total = _alone

    def __call__(
        self, params: dict, rows: dict[str, Array], batch: dict, anchors: Array | None, weight: Array
    ) -> tuple[Array, dict]:
        """The loss that a step minimises, and what is reported of it.

        Args:
            params: of the whole model; the drafter's losses give no gradient to anything but "mtp".
            rows: float32 Engram rows {"l<L>": [B, T, columns, width]}, as the tables hold them.
            anchors: int32 [B, A], where drafts begin (stages with a drafter).
            weight: float32 [], sum of the batch's weights over all rows of a step.

        Returns:
            float32 [], and {"loss", "nats", "index", "balance", "dropped" float32 [], "loads" [layers, 2, E]}, for a
            drafter {"draft_loads" [blocks, 2, E], "draft_<part>"} of `loss.draft_loss`. Numbers of the parts of a step
            add up to the step's.
        """
        hidden, notes = self._forward(params, rows, batch)
        loss, report = jnp.zeros((), jnp.float32), {}
        if self.stage != "drafter":
            loss, report = self._backbone(params, batch, hidden, notes, weight)
        if self.stage != "backbone":
            draft, parts = self._drafter(params, batch, anchors, hidden, notes)
            loss = loss + draft
            report |= {f"draft_{name}": value for name, value in parts.items()}
        return loss, {"loss": loss, **report}

    def _forward(self, params: dict, rows: dict[str, Array], batch: dict) -> tuple[Array, dict]:
        if self.stage == "drafter":
            options = dataclasses.replace(self.options, index_loss="none")
            return forward_batch(self.config, self.numerics, options, params, rows, batch)
        facts = token_facts(batch["segment_ids"], batch["weights"])
        return forward_batch(self.config, self.numerics, self.options, params, rows, batch, facts)

    def _backbone(self, params: dict, batch: dict, hidden: Array, notes: dict, weight: Array) -> tuple[Array, dict]:
        objective, router, total = self.objective, notes["router"], self.total
        nats = summed_nats(self.config, self.numerics, params, hidden, batch["targets"], batch["weights"])
        language = total(nats) / weight
        # Tokens that count for balance are more than targets, by one a sample; the difference is in the weight 1e-4.
        balance = total(jnp.sum(router.balance)) / weight
        index = jnp.zeros((), jnp.float32)
        if self.options.index_loss != "none" and notes["index"] is not None:
            kl, queries = map(total, notes["index"])
            index = jnp.sum(kl / jnp.maximum(queries, 1)) / self.parts
        loss = language + objective.balance_weight * balance + objective.index_weight * index
        report = {"nats": language, "balance": balance, "index": index}
        report |= {"loads": total(router.loads), "dropped": total(jnp.sum(router.dropped).astype(jnp.float32))}
        return loss, report

    def _drafter(
        self, params: dict, batch: dict, anchors: Array, hidden: Array, notes: dict
    ) -> tuple[Array, dict[str, Array]]:
        """DSpark's loss; the target is constant, and so are the embedding and the head that it lends the drafter."""
        target, hidden, taps = jax.lax.stop_gradient(
            ({name: part for name, part in params.items() if name != "mtp"}, hidden, notes["taps"])
        )
        rounds = DraftRounds(self.config, batch, anchors)
        logits, confidence, loads = rounds.draft(self.numerics, {**target, "mtp": params["mtp"]}, taps)
        places = rounds.take(hidden, rounds.places)
        wanted = model.head(self.config, self.numerics, target, places)
        loss, parts = draft_loss(logits, wanted, rounds.targets, confidence, rounds.weights, self.total)
        loss, parts = jax.tree.map(lambda x: x / self.parts, (loss, parts))
        return loss, {**parts, "loads": self.total(loads)}
