"""A slow, independent float64 numpy model of DeepSeek-V4.1 ("float32" numerics: stored weights, nothing else rounded).

Written from the numerical specification only; it shares no code with `dsv41_jax`. It takes the released-layout config
as a plain dict and weights as {released tensor name: float64 array} (see `oracle_weights`). One sequence at a time,
every token computed from the tokens before it, so decoding step by step equals one prefill by construction.

Array letters: n tokens, C residual copies, D hidden size, V vocabulary, K index_topk, N compressed entries.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from oracle_attention import (
    Selection,
    Stream,
    attend,
    candidate_pool,
    compress,
    index_scores,
    nearest_source,
    output_projection,
    queries,
    select,
    sparse_attention,
    window_rows,
)
from oracle_engram import engram_update, hash_rows, table_rows
from oracle_parts import Weights, coefficients, collapse, expand, mixture, rms_norm, rope_frequencies

TEXT, START, IMAGE, NEW_LINE, END = -1, 0, 1, 2, 3  # token types; everything but TEXT is an image span


@dataclass
class _Shared:
    """What sources leave for later layers within one forward pass."""

    streams: dict[int, Stream] = field(default_factory=dict)
    selections: dict[int, Selection] = field(default_factory=dict)
    pool: np.ndarray | None = None
    pool_margin: np.ndarray | None = None


class Oracle:
    """The whole model.

    `config` is the released-layout JSON dict, `token_map` [V] maps raw to compressed ids (None without Engram).
    Raises ValueError on table sizes or a candidate pool that the spec forbids; others are not looked for.
    """

    def __init__(self, config: dict, weights: Weights, token_map: np.ndarray | None = None):
        self.config, self.text, self.weights, self.token_map = config, config["text_config"], weights, token_map
        text = self.text
        source = text.get("candidate_source_layer_id")
        self.candidate_source = None if source is None or source < 0 else source
        if self.candidate_source is not None:
            block = text["candidate_block_size"]
            if text["candidate_topk_blocks"] * block - (block - 1) < text["index_topk"]:
                raise ValueError("the candidate pool can be smaller than index_topk")
        if list(text["engram_num_embeddings"]) != table_rows(text):
            raise ValueError(f"engram_num_embeddings must be {table_rows(text)}, not {text['engram_num_embeddings']}")

    # --- backbone ----------------------------------------------------------------------------------------------------

    def embed(self, ids: np.ndarray, image_embeds: np.ndarray | None, token_types: np.ndarray) -> np.ndarray:
        """[n, D]: embedding rows; image spans take the learned vectors and, in reading order, image_embeds [m, D]."""
        x = self.weights["embed.weight"][ids].copy()
        for kind, name in ((START, "image_start"), (NEW_LINE, "image_newline"), (END, "image_end")):
            if (token_types == kind).any():
                x[token_types == kind] = self.weights[name]
        if (token_types == IMAGE).any():
            x[token_types == IMAGE] = image_embeds
        return x

    def forward(
        self, ids: np.ndarray, image_embeds: np.ndarray | None = None, token_types: np.ndarray | None = None
    ) -> dict[str, Any]:
        """Run the backbone on one sequence.

        ids [n] raw token ids (expanded, with the image id in spans); token_types [n] as the module constants (None:
        all text); image_embeds [number of IMAGE slots, D].

        Returns logits [n, V]; hidden [n, D] (before the last norm); taps [n, taps*D]; and dicts by layer:
        topk [n, K] ascending, -1 padded, topk_margin [n] (index sources);
        candidates bool [n, N], candidate_margin [n] (candidate source);
        experts [n, k] best first, expert_margin [n]; block_out [n, C, D]; pre_mix [n, C]; engram_hash [n, columns];
        main_kv [N, d], index_key [N, index_head_dim] (KV sources, rotated).
        A margin is the score gap between the last chosen and the first unchosen: inf = no choice. Ties go to the
        lowest index; ReLU makes index scores tie at exactly 0, and there the margin is the change that would break it.
        """
        text, ids = self.text, np.asarray(ids, np.int64).reshape(-1)
        types = np.full(len(ids), TEXT) if token_types is None else np.asarray(token_types).reshape(-1)
        image, positions = types != TEXT, np.arange(len(ids))
        by_layer: dict[str, dict[int, np.ndarray]] = {
            name: {}
            for name in (
                "topk", "topk_margin", "candidates", "candidate_margin", "experts", "expert_margin", "block_out",
                "pre_mix", "engram_hash", "main_kv", "index_key",
            )
        }  # fmt: skip
        x = np.repeat(self.embed(ids, image_embeds, types)[:, None, :], text["hc_mult"], axis=1)
        mix = np.zeros((len(ids), text["hc_mult"]))
        mix[:, 0] = 1.0
        shared, taps = _Shared(), []
        for layer in range(text["num_hidden_layers"]):
            if layer in text["engram_layer_ids"]:
                pad = int(self.token_map[text["engram_pad_token_id"]])
                rows = hash_rows(text, layer, self.token_map[ids], image, pad)
                by_layer["engram_hash"][layer] = rows
                x = engram_update(text, self.weights, layer, x, rows, image)
            if layer in text["dspark_target_layer_ids"]:
                taps.append(x.mean(axis=1))

            def attention(y: np.ndarray, layer: int = layer) -> np.ndarray:
                return self._attention(layer, y, positions, shared)

            x, mix, experts, margin = self._block(
                f"layers.{layer}", x, mix, attention, image, text["num_experts_per_tok"]
            )
            by_layer["experts"][layer], by_layer["expert_margin"][layer] = experts, margin
            by_layer["block_out"][layer], by_layer["pre_mix"][layer] = x, mix
        for layer, stream in shared.streams.items():
            by_layer["main_kv"][layer], by_layer["index_key"][layer] = stream.main_kv, stream.index_key
        for layer, selection in shared.selections.items():
            by_layer["topk"][layer] = self._padded(selection.rows)
            by_layer["topk_margin"][layer] = selection.margin
        if shared.pool is not None:
            by_layer["candidates"][self.candidate_source] = shared.pool
            by_layer["candidate_margin"][self.candidate_source] = shared.pool_margin
        hidden = collapse(x, mix)
        normed = rms_norm(hidden, self.weights["norm.weight"], text["rms_norm_eps"])
        return {
            "logits": normed @ self.weights["head.weight"].T,
            "hidden": hidden,
            "taps": np.concatenate(taps, axis=-1) if taps else np.zeros((len(ids), 0)),
            **by_layer,
        }

    def forward_packed(self, ids: np.ndarray, lengths: list[int]) -> list[dict[str, Any]]:
        """Packed text samples: ids [sum of lengths]; each sample gives exactly what it gives alone."""
        ends = np.cumsum(lengths)
        return [self.forward(ids[end - length : end]) for end, length in zip(ends, lengths, strict=True)]

    def _block(
        self,
        prefix: str,
        x: np.ndarray,
        mix: np.ndarray,
        attention: Callable[[np.ndarray], np.ndarray],
        image: np.ndarray,
        chosen_count: int,
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Two sublayers around the streams x [n, C, D]; mix [n, C] comes from the previous block's FFN.

        Returns x, the mix for the next block, experts [n, k] and expert margin [n].
        """
        text, weights, eps = self.text, self.weights, self.text["rms_norm_eps"]
        pre_attn, post, comb = coefficients(text, weights, f"{prefix}.hc_attn", x)
        u = attention(rms_norm(collapse(x, mix), weights[f"{prefix}.attn_norm.weight"], eps))
        x = expand(u, x, post, comb)
        pre_ffn, post, comb = coefficients(text, weights, f"{prefix}.hc_ffn", x)
        y = rms_norm(collapse(x, pre_attn), weights[f"{prefix}.ffn_norm.weight"], eps)
        u, experts, margin = mixture(text, weights, f"{prefix}.ffn", y, image, chosen_count)
        return expand(u, x, post, comb), pre_ffn, experts, margin

    def _attention(self, layer: int, y: np.ndarray, positions: np.ndarray, shared: _Shared) -> np.ndarray:
        """Attention of one backbone layer; a source first leaves its stream (unless there is one) or selection in
        `shared`.
        """
        text, weights = self.text, self.weights
        if text["compress_ratios"][layer] == 0:
            return attend(text, weights, layer, y, positions, None, None)
        if layer in text["kv_source_layer_ids"] and layer not in shared.streams:
            shared.streams[layer] = compress(text, weights, layer, y, positions)
        stream = shared.streams[nearest_source(text["kv_source_layer_ids"], layer)]
        if layer in text["index_source_layer_ids"]:
            scores, slack = index_scores(text, weights, layer, y, positions, stream.index_key)
            searches = self.candidate_source is not None and layer > self.candidate_source
            shared.selections[layer] = select(text, scores, slack, shared.pool if searches else None)
            if layer == self.candidate_source:
                shared.pool, shared.pool_margin = candidate_pool(text, scores, slack)
        selection = shared.selections[nearest_source(text["index_source_layer_ids"], layer)]
        return attend(text, weights, layer, y, positions, stream.main_kv, selection.rows)

    def _padded(self, rows: list[np.ndarray]) -> np.ndarray:
        """Lists of entries -> int64 [n, K], -1 after the last one."""
        table = np.full((len(rows), self.text["index_topk"]), -1, np.int64)
        for t, chosen in enumerate(rows):
            table[t, : len(chosen)] = chosen
        return table

    # --- draft head --------------------------------------------------------------------------------------------------

    def draft(self, forward_result: dict[str, Any], position: int, next_token: int) -> dict[str, np.ndarray]:
        """One greedy DSpark round after `position`, with `next_token` chosen for position + 1.

        Returns tokens [block + 1] (next_token first), logits [block, V] (Markov term included), base_logits [block, V],
        confidence [block] (raw), margin [block] (gap between best and second logit) and, by draft block, experts and
        expert_margin.
        """
        text, weights, eps = self.text, self.weights, self.text["rms_norm_eps"]
        n_drafts, block = text["num_nextn_predict_layers"], text["dspark_block_size"]
        last, freqs = f"mtp.{n_drafts - 1}", rope_frequencies(text, 0)
        seen = np.arange(max(0, position - text["sliding_window"] + 1), position + 1)
        own = np.arange(position + 1, position + 1 + block)
        main = forward_result["taps"][seen] @ weights["mtp.0.main_proj.weight"].T
        main = rms_norm(main, weights["mtp.0.main_norm.weight"], eps)
        ids = np.array([next_token] + [text["dspark_noise_token_id"]] * (block - 1))
        x = np.repeat(weights["embed.weight"][ids][:, None, :], text["hc_mult"], axis=1)
        mix = np.zeros((block, text["hc_mult"]))
        mix[:, 0] = 1.0
        all_experts, all_margins = {}, {}
        for number in range(n_drafts):
            prefix = f"mtp.{number}.attn"
            ring = window_rows(text, weights, prefix, main, seen, freqs)

            def attention(y: np.ndarray, prefix: str = prefix, ring: np.ndarray = ring) -> np.ndarray:
                # Every draft position sees the ring and the whole block, itself and later ones included.
                rows = np.concatenate([ring, window_rows(text, weights, prefix, y, own, freqs)])
                q = queries(text, weights, prefix, y, own, freqs)
                o = np.stack([sparse_attention(one, rows, weights[f"{prefix}.attn_sink"]) for one in q])
                return output_projection(text, weights, prefix, o, own, freqs)

            no_image = np.zeros(block, bool)
            x, mix, all_experts[number], all_margins[number] = self._block(
                f"mtp.{number}", x, mix, attention, no_image, text["dspark_num_experts_per_tok"]
            )
        hidden = collapse(x, mix)
        base = rms_norm(hidden, weights[f"{last}.norm.weight"], eps) @ weights["head.weight"].T
        tokens, logits, confidence, margin = [int(next_token)], [], [], []
        for step in range(block):
            e = weights[f"{last}.markov_head.embed.weight"][tokens[-1]]
            logits.append(base[step] + weights[f"{last}.markov_head.head.weight"] @ e)
            proj = weights[f"{last}.confidence_head.proj.weight"]
            confidence.append((proj @ np.concatenate([hidden[step], e])).item())
            second, first = np.partition(logits[-1], -2)[-2:]
            margin.append(first - second)
            tokens.append(int(np.argmax(logits[-1])))
        return {
            "tokens": np.array(tokens),
            "logits": np.stack(logits),
            "base_logits": base,
            "confidence": np.array(confidence),
            "margin": np.array(margin),
            "experts": all_experts,
            "expert_margin": all_margins,
        }
