"""Kernels of the model's costly operations, each beside a plain `jax.numpy` reference.

    sparse_attention   softmax over an FP8 window and selected FP4 entries
    indexer            scores of FP4 index keys, candidate pools, exact selection
    kv_write           norm, rotation and packing of what the caches keep
    moe                grouped matmuls of routed experts, stored in FP4, FP8 or bf16
    quantized_linear   dense FP8 maps with a quantised input
    mhc                the residual streams' update, mix and norm in one pass

A package per operation: `__init__` checks arguments and selects, `reference` says what is right, `tpu` (Mosaic) and
`gpu` (Triton) compute it. `implementation` holds the choice, `gpu_codes` what GPU kernels decode codes with, `flops`
how much arithmetic a call of each kernel is, `schedule` reads the TPU compiler's schedule.
"""

# The two packages import each other's modules. Beginning with this one in every case, there is one order of imports.
import dsv41_jax  # noqa: F401
