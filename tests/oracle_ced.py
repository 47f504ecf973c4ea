"""CED prefill and encoder replay in the slow oracle: one pass over the tokens that are read, windows cut by side.

Written from the definition, in one piece: there are no caches, rings, pages or blocks here. The decoder is the last KV
source and every layer after it; a prompt of n tokens with window W and a prefix of `hit` tokens (0: none) is read so:

    encoder   tokens [hit - W, n); a window ends at the first of them
    entries   groups wholly inside the prefix come from a run without a hit; all others from the tokens read here
    decoder   tokens [n - W, n); a window ends at the first of them

Tokens after the prompt run through all layers.
"""

from typing import Any

import numpy as np

from oracle import TEXT, Oracle, _Shared
from oracle_attention import Stream, compress
from oracle_engram import engram_update, hash_rows
from oracle_parts import collapse, rms_norm


class CedOracle(Oracle):
    """The whole model, reading prompts as CED does."""

    @property
    def decoder_start(self) -> int:
        """First layer of the decoder."""
        return self.text["kv_source_layer_ids"][-1]

    def read(
        self,
        ids: np.ndarray,
        n: int,
        hit: int = 0,
        kept: dict[str, Any] | None = None,
        image_embeds: np.ndarray | None = None,
        token_types: np.ndarray | None = None,
    ) -> dict[str, Any]:
        """Read a prompt ids[:n] of which `hit` tokens are a prefix with kept entries, then the tokens ids[n:].

        Args:
            ids: raw token ids of the whole sequence. image_embeds, token_types: see `Oracle.forward`.
            kept: a result of this function without a hit on a sequence with the same first `hit` tokens.

        Returns:
            begin, split: first token of the encoder and of the decoder.
            logits [len(ids) - split, V]; topk {decoder layer: [len(ids) - split, K]}.
            taps [len(ids), taps * D], NaN before `split`, so that `draft` can be asked.
            main_kv, index_key {source: [N, ...]}; source_in {source: normed attention inputs [len(ids) - begin, D]}.
            block_out {encoder layer: [len(ids) - begin, C, D]}.
            margin: the smallest score gap of all choices made (experts, entries, candidates).
        """
        text, weights, width = self.text, self.weights, self.text["sliding_window"]
        ids = np.asarray(ids, np.int64)
        begin = max(hit - width, 0)
        split = max(begin, n - width)
        types = np.full(len(ids), TEXT) if token_types is None else np.asarray(token_types)
        image, positions = types != TEXT, np.arange(len(ids))
        x = np.repeat(self.embed(ids, image_embeds, types)[begin:, None, :], text["hc_mult"], axis=1)
        mix = np.zeros(x.shape[:2])
        mix[:, 0] = 1.0
        shared, first, margins, taps = _Shared(), begin, [], []
        source_in, block_out = {}, {}
        for layer in range(text["num_hidden_layers"]):
            if layer in text["engram_layer_ids"]:
                # N-grams reach back to true ids that are not read again.
                pad = int(self.token_map[text["engram_pad_token_id"]])
                rows = hash_rows(text, layer, self.token_map[ids], image, pad)[first:]
                x = engram_update(text, weights, layer, x, rows, image[first:])
            if layer in text["kv_source_layer_ids"]:
                eps = text["rms_norm_eps"]
                y = rms_norm(collapse(x, mix), weights[f"layers.{layer}.attn_norm.weight"], eps)
                source_in[layer] = y
                shared.streams[layer] = self.joined(layer, y, begin, hit, kept)
            if layer == self.decoder_start:
                x, mix, first = x[split - begin :], mix[split - begin :], split
            if layer in text["dspark_target_layer_ids"]:
                taps.append(x.mean(axis=1)[split - first :])

            def attention(y: np.ndarray, layer: int = layer, first: int = first) -> np.ndarray:
                return self._attention(layer, y, positions[first:], shared)

            chosen = text["num_experts_per_tok"]
            x, mix, _, margin = self._block(f"layers.{layer}", x, mix, attention, image[first:], chosen)
            margins.append(margin.min())
            if layer < self.decoder_start:
                block_out[layer] = x
        margins += [selection.margin.min() for selection in shared.selections.values()]
        if shared.pool_margin is not None:
            margins.append(shared.pool_margin.min())
        normed = rms_norm(collapse(x, mix), weights["norm.weight"], text["rms_norm_eps"])
        joined = np.concatenate(taps, axis=-1) if taps else np.zeros((len(x), 0))
        return {
            "begin": begin,
            "split": split,
            "logits": normed @ weights["head.weight"].T,
            "topk": {i: self._padded(s.rows) for i, s in shared.selections.items() if i >= self.decoder_start},
            "taps": np.concatenate([np.full((split, joined.shape[1]), np.nan), joined]),
            "main_kv": {layer: stream.main_kv for layer, stream in shared.streams.items()},
            "index_key": {layer: stream.index_key for layer, stream in shared.streams.items()},
            "source_in": source_in,
            "block_out": block_out,
            "margin": min(margins),
        }

    def joined(self, layer: int, y: np.ndarray, begin: int, hit: int, kept: dict[str, Any] | None) -> Stream:
        """A source's entries: those of the prefix as they were kept, the others from inputs y of tokens from `begin`
        on.
        """
        ratio = self.text["compress_ratios"][layer]
        whole = hit // ratio  # groups wholly inside the prefix
        rest = y[whole * ratio - begin :]
        new = compress(self.text, self.weights, layer, rest, whole * ratio + np.arange(len(rest)))
        if not whole:
            return new
        return Stream(
            np.concatenate([kept["main_kv"][layer][:whole], new.main_kv]),
            np.concatenate([kept["index_key"][layer][:whole], new.index_key]),
        )

    def entry_of_a_kept_row(self, layer: int, read: dict[str, Any], hit: int, kept: dict[str, Any]) -> np.ndarray:
        """Main KV [d] that the group across an odd `hit` would have if the prefix had kept its last row."""
        inputs = read["source_in"][layer].copy()
        inputs[hit - 1 - read["begin"]] = kept["source_in"][layer][hit - 1]
        return self.joined(layer, inputs, read["begin"], hit, kept).main_kv[hit // 2]
