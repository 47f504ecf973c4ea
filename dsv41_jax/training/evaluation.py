"""Held-out loss during a run, and what encoder-only prefill costs in it.

On all evaluation rows: nats a token by the exact forward. On some samples alone, of the tokens behind a prompt that is
half of each: nats by the exact forward, by the forward with simulated decoder replay, and by what serving does, which
is encoder-only prefill of the prompt and the rest through the cache.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import PartitionSpec as Spec

from dsv41_jax import model, sharded_step, sharding
from dsv41_jax.engram_hash import EngramHasher
from dsv41_jax.forward_options import ForwardOptions
from dsv41_jax.generate import Model
from dsv41_jax.numerics import Numerics
from dsv41_jax.runner import Runner
from dsv41_jax.training.data_settings import DataSettings
from dsv41_jax.training.loss import token_nats
from dsv41_jax.training.objective import forward_batch
from dsv41_jax.training.pipeline import open_pipeline
from dsv41_jax.training.replay_floor import replay_floors
from dsv41_jax.training.shards import batch_on_mesh, own_shard
from dsv41_jax.training.step import Trainer, without_tables
from dsv41_jax.training.token_loss import summed_nats
from dsv41_jax.training.train_settings import EvaluationSettings


class Evaluation:
    """Evaluates parameters on the same rows every time.

    Args:
        settings: with at least one source. data: of the training, for the shape of the batches.
        trainer: of the run. token_map: int [vocab] for Engram.

    Raises:
        ValueError, FileNotFoundError: see `open_pipeline`; also held-out text that does not fill a batch.
    """

    def __init__(
        self, settings: EvaluationSettings, data: DataSettings, trainer: Trainer, token_map: np.ndarray | None
    ):
        self.trainer, self.config = trainer, trainer.config
        self._options = ForwardOptions(candidates=trainer.losses.options.candidates)
        self._hasher = EngramHasher(self.config, token_map) if self.config.engram_layer_ids else None
        shard, shards = own_shard(trainer.mesh, data.batch)
        of_rows = dataclasses.replace(
            data, sources=settings.sources, shuffle=False, epochs=1, replay_prompts=False, replay_probability=0.0
        )
        pipeline = open_pipeline(
            dataclasses.replace(of_rows, prefetch=0), self.config, token_map, shard=shard, shards=shards
        )
        count = -(-settings.rows // data.batch)
        self._batches = [batch for batch, _ in zip(pipeline, range(count), strict=False)]
        if not self._batches:
            raise ValueError("evaluation: the held-out sources have no documents")
        # Serving's path runs on one device here; a model without a separate encoder has nothing to compare.
        alone = trainer.mesh is None and self.config.supports_ced
        self._samples = self._alone(settings.ced_rows) if alone else None
        self._programs: dict[Numerics, jax.stages.Wrapped] = {}

    def _alone(self, count: int) -> np.ndarray | None:
        """int32 [n, M]: the longest sample without images of each of the first rows, cut to one length; None where all
        are short.
        """
        longest = []
        for batch in self._batches:
            images = batch.get("image_mask", np.zeros_like(batch["token_ids"], bool))
            rows = zip(batch["token_ids"], batch["segment_ids"], batch["weights"], images, strict=True)
            for ids, segments, weights, image in rows:
                lengths = np.bincount(segments, (weights > 0) & ~np.isin(segments, segments[image]))
                best = int(lengths.argmax())
                own = np.flatnonzero(segments == best)
                longest.append(ids[own[: int(lengths[best]) + 1]])
        longest = [ids for ids in longest if len(ids) > 2 * self.config.sliding_window][:count]
        if not longest:
            return None
        shortest = min(map(len, longest))
        return np.stack([ids[:shortest] for ids in longest]).astype(np.int32)

    def __call__(self, params: dict, numerics: Numerics) -> dict[str, float]:
        """Nats a token and perplexity; with samples of two windows or more also `behind_prompt_*` in nats."""
        program = self._programs.setdefault(numerics, jax.jit(functools.partial(self._sums, numerics)))
        sums = np.zeros(2)
        for batch in self._batches:
            on_device = batch if self.trainer.mesh is None else batch_on_mesh(batch, self.trainer.mesh)
            sums += np.asarray(jax.device_get(program(params, on_device)), np.float64)
        nats = float(sums[0] / max(sums[1], 1.0))
        found = {"nats": nats, "perplexity": math.exp(min(nats, 50.0)), "numerics": numerics.name}
        if self._samples is not None:
            found |= self._behind_prompts(params, numerics)
        return found

    def _sums(self, numerics: Numerics, params: dict, batch: dict) -> tuple[Array, Array]:
        """Weighted nats and weights of a batch over all devices."""
        trainer = self.trainer
        weight = jnp.sum(batch["weights"])
        memory = trainer.look_up(params, batch["memory"])
        if trainer.mesh is None:
            return _nats(self.config, numerics, self._options, without_tables(params), memory, batch), weight
        spread = numerics.spread(trainer.parallel)

        def local(params: dict, memory: dict, batch: dict) -> Array:
            return jax.lax.psum(_nats(self.config, spread, self._options, params, memory, batch), sharded_step.ROW_AXES)

        params = without_tables(params)
        specs = sharding.param_specs(params, sharding.layout_of(trainer.mesh)), sharded_step.ROWS, sharded_step.ROWS
        step = jax.shard_map(local, mesh=trainer.mesh, in_specs=specs, out_specs=Spec(), check_vma=False)
        return step(params, memory, batch), weight

    # Behind prompts

    def _behind_prompts(self, params: dict, numerics: Numerics) -> dict[str, float]:
        ids = self._samples
        prompt = ids.shape[1] // 2
        floors = np.tile(replay_floors(ids.shape[1], 0, prompt, self.config.sliding_window), (len(ids), 1))
        memory = {}
        if self._hasher is not None:
            rows, _ = self._hasher(ids)
            memory = {f"l{layer}": rows[i] for i, layer in enumerate(self.config.engram_layer_ids)}
        forward = functools.partial(_sample_nats, self.config, numerics, params, ids, memory, prompt=prompt)
        return {
            "behind_prompt_exact": float(forward(np.zeros_like(floors))),
            "behind_prompt_replay": float(forward(floors)),
            "behind_prompt_ced": self._through_the_cache(params, numerics, prompt),
        }

    def _through_the_cache(self, params: dict, numerics: Numerics, prompt: int) -> float:
        ids = self._samples
        served = Model(Runner(self.config, numerics, params, self._hasher, {}), None)
        logits, cache = served.prefill(ids[:, :prompt], mode="ced", max_len=ids.shape[1])
        following, _ = served.decode(cache, ids[:, prompt:-1])
        every = jnp.concatenate([logits[:, None], following], axis=1)
        return float(jnp.mean(token_nats(every, ids[:, prompt:])))


def _nats(config, numerics: Numerics, options: ForwardOptions, params: dict, memory: dict, batch: dict) -> Array:
    hidden, _ = forward_batch(config, numerics, options, params, memory, batch)
    return summed_nats(config, numerics, params, hidden, batch["targets"], batch["weights"])


@functools.partial(jax.jit, static_argnums=(0, 1), static_argnames="prompt")
def _sample_nats(
    config, numerics: Numerics, params: dict, ids: Array, memory: dict, floors: Array, *, prompt: int
) -> Array:
    """Mean nats of the tokens from `prompt` on, of whole samples ids [n, M]."""
    hidden, _ = model.forward(config, numerics, params, ids, memory, replay=floors)
    logits = model.head(config, numerics, params, hidden[:, prompt - 1 : -1])
    return jnp.mean(token_nats(logits, ids[:, prompt:]))
