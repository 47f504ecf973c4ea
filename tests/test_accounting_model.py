"""What the model costs: published numbers, and closed arithmetic against what the model's own steps compute at released
sizes. Nothing is compiled, no array is made. Encoder-only against exact prefill of a prompt: `test_ced_work`.
"""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv41_jax import accounting, cache, model
from dsv41_jax.cache_size import cache_bytes, tokens_that_fit
from dsv41_jax.checkpoint.manifest import totals
from dsv41_jax.checkpoint.released import abstract_params
from dsv41_jax.config import load_config
from dsv41_jax.jaxpr_flops import work
from dsv41_jax.kernel_params import abstract_packed
from dsv41_jax.numerics import RELEASED
from dsv41_jax.parameter_count import BACKBONE, active_parameters, hand_over_parameters, module_sizes
from hollow_kernels import hollow_kernels

CONFIGS = Path(__file__).parent.parent / "configs"
FLASH = load_config(CONFIGS / "flash.py")
SHORT, LONG = 4096, 1 << 20
BATCH = 16  # a tile of rows: none is padding
GIGA = 10**9


def within(found: float, expected: float, relative: float) -> bool:
    return abs(found - expected) <= relative * expected


class TestParameters:
    def test_published_totals(self):
        """552 B and 196 B of Engram tables, and the 510,286,023,000 bytes of the checkpoint."""
        sizes = module_sizes(FLASH)
        assert round(sum(sizes[module].parameters for module in BACKBONE) / GIGA) == 552
        assert sizes["Engram tables"].parameters == 256 * (384006168 + 384016682)
        assert sum(size.nbytes for size in sizes.values()) == totals(FLASH).nbytes == 510_286_023_000
        assert sum(size.parameters for size in sizes.values()) == totals(FLASH).parameters

    def test_modules_by_hand(self):
        d, layers, expert = 5120, 40, 3 * 5120 * 2304
        attention = 1280 * d + 64 * 512 * 1280 + 512 * d + 8192 * 4096 + 8192 * d
        sizes = {module: size.parameters for module, size in module_sizes(FLASH).items()}
        assert sizes["embedding"] == sizes["head"] == 129280 * d
        assert sizes["attention"] == layers * (attention + 1280 + 512 + 64)
        assert sizes["compressors"] == 3 * 2 * 512 * d + 512 * d + 4 * (512 + 128 * 512 + 128)
        assert sizes["indexers"] == 8 * (32 * 128 * 1280 + 32 * d)
        assert sizes["hyper-connections"] == layers * 2 * (24 * 4 * d + 24 + 3)
        assert sizes["norms"] == (2 * layers + 1) * d
        assert sizes["router"] == layers * 384 * (d + 2)
        assert sizes["routed experts"] == layers * 384 * expert
        assert sizes["shared experts"] == layers * expert
        assert sizes["Engram projections"] == 2 * (5 * d * 6144 + 2 * 4 * d)

    @pytest.mark.parametrize(("storage", "bits"), [("fp4", 4.25), ("fp8", 8.25), ("bf16", 16)])
    def test_bytes_of_stored_experts(self, storage, bits):
        """A scale byte for 32 weights, but in bf16."""
        size = module_sizes(FLASH, storage)["routed experts"]
        assert size.nbytes == size.parameters * bits / 8

    def test_active(self):
        """7.89 B in the encoder's layers and 16.13 B in all and the head; matrices only, no embedding."""
        active = active_parameters(FLASH)
        assert round(sum(each.prefill for each in active.values()) / GIGA, 2) == 7.89
        assert round(sum(each.decode for each in active.values()) / GIGA, 2) == 16.13
        assert active["attention"].decode == 40 * 126_615_552 == 2 * active["attention"].prefill
        experts = active["routed experts"].decode + active["shared experts"].decode
        assert experts == 40 * 7 * 3 * 5120 * 2304
        assert active["Engram projections"].prefill == active["Engram projections"].decode == 2 * 25600 * 6144
        assert (active["head"].prefill, active["head"].decode) == (0, 129280 * 5120)
        assert hand_over_parameters(FLASH) == 512 * 5120 + 128 * 512  # layer 20's entries are made in prefill too

    def test_other_models(self):
        """Every parameter of every configuration belongs to a module."""
        for name in ("tiny.py", "demo.py"):
            config = load_config(CONFIGS / name)
            sizes = module_sizes(config)
            assert sum(size.parameters for size in sizes.values()) == totals(config).parameters
            assert sum(size.nbytes for size in sizes.values()) == totals(config).nbytes


class TestArithmetic:
    def test_the_reports_growth(self):
        """20.2 to 25.7 weighted GFLOP a token from 4K to 1M, with experts and wo_a counted as FP8: a ratio of 1.27.

        The release multiplies by wo_a in bf16. Counted so, it is 21.5 to 27.0: a ratio of 1.25.
        """
        short, long = accounting.decode(FLASH, SHORT), accounting.decode(FLASH, LONG)
        assert round(short.weighted(stored=True) / GIGA, 1) == 20.2
        assert round(long.weighted(stored=True) / GIGA, 1) == 25.7
        assert round(long.weighted(stored=True) / short.weighted(stored=True), 2) == 1.27
        assert round(short.weighted() / GIGA, 1) == 21.5 and round(long.weighted() / GIGA, 1) == 27.0
        assert round(long.weighted() / short.weighted(), 2) == 1.25

    def test_growth_is_four_scans(self):
        """What grows: keys of three sources of ratio 2 and of layer 20, and 16,384 candidates of four more layers."""
        short, long = accounting.decode(FLASH, SHORT).by_module(), accounting.decode(FLASH, LONG).by_module()
        key = 2 * 32 * 128
        assert short["index scores"] == key * (3 * SHORT / 2 + 5 * SHORT)
        assert long["index scores"] == key * (3 * LONG / 2 + LONG + 4 * 16384)
        assert {module for module in short if short[module] != long[module]} == {"index scores"}
        assert long["attention over keys"] == 4 * 64 * 512 * (38 * 640 + 2 * 128)

    def test_maps_take_two_operations_for_each_active_parameter(self):
        """But index keys, made once for the two tokens of an entry."""
        phase, active = accounting.decode(FLASH, 1).by_module(), active_parameters(FLASH)
        for module, each in active.items():
            once = 3 * 128 * 512 if module == "compressors" else 0
            assert phase[module] == 2 * each.decode - once

    @pytest.mark.parametrize("tokens", [SHORT, 1 << 17, LONG])
    def test_encoder_prefill_is_at_most_0_56_of_exact(self, tokens):
        part, whole = accounting.encoder_prefill(FLASH, tokens), accounting.exact_prefill(FLASH, tokens)
        assert 0.49 < part.flops / whole.flops <= 0.56
        assert 0.49 < part.weighted() / whole.weighted() <= 0.56

    def test_prefill_is_its_tokens(self):
        """A prompt costs what its tokens cost one by one, but for the logits of all but the last."""
        tokens = [accounting.decode(FLASH, context) for context in range(1, 300)]
        head = 2 * 129280 * 5120
        assert accounting.exact_prefill(FLASH, 299).flops == sum(token.flops for token in tokens) - 298 * head
        assert accounting.verify(FLASH, 290, 5).flops == sum(token.flops for token in tokens[289:294])

    def test_no_token_is_an_error(self):
        with pytest.raises(ValueError, match="there must be a token"):
            accounting.encoder_prefill(FLASH, 0)
        with pytest.raises(ValueError, match="sees itself at least"):
            accounting.decode(FLASH, 0)


@functools.cache
def abstract(implementation: str) -> tuple:
    """Numerics and parameters in the forms of the kernels."""
    numerics = RELEASED.computed_by(implementation)
    return numerics, abstract_packed(abstract_params(FLASH, numerics))


def step(implementation: str, context: int, batch: int, block: int, **options) -> dict[str, float]:
    """FLOPs of `model.extend` on a block of tokens of each of some rows, whose caches hold `context` tokens."""
    numerics, params = abstract(implementation)

    def spec(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.int32)

    memory = {f"l{layer}": spec(batch, block, FLASH.engram_layout.columns) for layer in FLASH.engram_layer_ids}
    arrays = cache.abstract_arrays(FLASH, numerics, batch, context)
    function = functools.partial(model.extend, FLASH, numerics, **options)
    inputs = (params, arrays, spec(batch, block), spec(batch), spec(batch), memory)
    return work(function, *inputs, expert_rows=batch * block * FLASH.num_experts_per_tok)


def assert_agree(found: dict[str, float], phase: accounting.Phase, batch: int = 1) -> None:
    """Weighted within 5%, and each precision too; a CPU widens bf16 products of plain code to float32."""
    expected = {name: count * batch for name, count in phase.by_precision().items()}
    assert within(accounting.weighted(found), accounting.weighted(expected), 0.05)
    for names in (("fp4",), ("fp8",), ("bf16", "f32")):
        assert within(sum(found[n] for n in names), sum(expected[n] for n in names), 0.05), names


class TestSteps:
    """The model's own steps through the kernels, at released sizes."""

    @pytest.mark.parametrize("implementation", ["tpu", pytest.param("gpu", marks=pytest.mark.slow)])
    def test_decode_at_4k_and_1m(self, implementation):
        """The same growth in the step and in the arithmetic: 1.25, at most 1.3."""
        weights = []
        for context in (SHORT, LONG):
            with hollow_kernels():
                found = step(implementation, context, BATCH, 1)
            assert_agree(found, accounting.decode(FLASH, context, draft_windows=True), BATCH)
            weights.append(accounting.weighted(found))
        print(f"{implementation}: {weights[0] / BATCH / GIGA:.2f} to {weights[1] / BATCH / GIGA:.2f} weighted GFLOP")
        assert 1.2 < weights[1] / weights[0] <= 1.3

    @pytest.mark.slow
    def test_verify(self):
        with hollow_kernels():
            found = step("tpu", SHORT, BATCH, 6, all_logits=True)
        assert_agree(found, accounting.verify(FLASH, SHORT - 5, draft_windows=True), BATCH)

    def test_encoder_prefill(self):
        """A block of 512 tokens at the end of a prompt; a kernel scores all keys, also those that come later."""
        with hollow_kernels():
            found = step("tpu", 1 << 17, 1, 512, layers="encoder")
        contexts = np.arange((1 << 17) - 511, (1 << 17) + 1)
        assert_agree(found, accounting.phase(FLASH, contexts, "encoder", logits=0))

    @pytest.mark.slow
    def test_whole_kernels_give_the_same_count(self):
        with hollow_kernels():
            hollow = step("tpu", SHORT, BATCH, 1)
        assert step("tpu", SHORT, BATCH, 1) == hollow


class TestCaches:
    def test_bytes(self):
        """890 a token persist; windows are 528 bytes a row, 43 rings of 144 rows, and the tails of three sources."""
        size = cache_bytes(FLASH, 64, 1 << 17)
        assert size.pages == 64 * (1 << 17) * 890
        assert size.windows == 64 * (43 * 144 * 528 + 2 * 3 * 17 * 512 * 4)
        assert size.tables == 64 * 4 * (1024 + 2)
        assert size.hbm == size.pages + size.windows + size.tables

    @pytest.mark.parametrize("batch", [1, 64])
    def test_what_fits_fits_and_one_page_more_does_not(self, batch):
        context = 12800
        size = cache_bytes(FLASH, batch, context).hbm
        assert tokens_that_fit(FLASH, size, batch) == batch * context
        assert tokens_that_fit(FLASH, size - 1, batch) == batch * context - 128
        assert tokens_that_fit(FLASH, 1000, batch) == 0


def test_touched_experts():
    """244 of 384 by 64 tokens; by drawing too."""
    assert round(accounting.touched_experts(384, 6, 64)) == 244
    assert accounting.touched_experts(384, 6, 1) == pytest.approx(6)
    rng = np.random.default_rng(0)
    drawn = [len({e for _ in range(5) for e in rng.permutation(20)[:3]}) for _ in range(4000)]
    assert np.mean(drawn) == pytest.approx(accounting.touched_experts(20, 3, 5), abs=5 * np.std(drawn) / 4000**0.5)


def test_the_command_prints_the_published_numbers(capsys):
    accounting.main(["--context", "4096", "1048576", "--free", "32"])
    text = capsys.readouterr().out
    for number in (
        "551.9 G",
        "196.6 G",
        "7.893 G",
        "16.13 G",
        "20.21 G",
        "25.65 G",
        "890 a token",
        "243.8",
        "32 GB hold",
    ):
        assert number in text, number
    accounting.main([f"--config={CONFIGS / 'tiny.py'}", "--context", "300", "--batch", "2"])
    assert "decode at 300 " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--batch=0"], "must be at least 1"),
        (["--config=missing"], "--config=missing"),
        (["--context=0"], "at least 1"),
    ],
)
def test_the_command_refuses_clearly(arguments, message, capsys):
    with pytest.raises(SystemExit):
        accounting.main(arguments)
    assert message in capsys.readouterr().err
