"""What the chips can do, by their makers' published figures: one table, a source for each row.

Rates are of one device as JAX counts devices: a v7x chip is two devices, a v5p chip (two cores) is one.
"""

import dataclasses

GB, TB, TERA = 10**9, 10**12, 10**12
GIB = 1 << 30


@dataclasses.dataclass(frozen=True)
class Chip:
    """One device's figures; bytes a second are in one direction.

    Attributes:
        platform: "tpu" or "cuda".
        memory: bytes of HBM that a program may use. For TPUs it is the limit that libtpu names when a program exceeds
            it; for GPUs 95 % of what is published, because the CUDA context and NCCL take a part.
        published_memory: bytes of HBM in the maker's table.
        bandwidth: bytes a second from HBM.
        bf16, fp8, int8: dense matmul FLOP/s by the narrower operand; without a faster unit for it, the rate of bf16.
        node: devices that share the links to the others: of a chip (TPU), of a host (GPU).
        inner: bytes a second between a device and the others of its node.
        link: bytes a second of one link that leaves a node. links: how many of them a node has at most.
        clock: Hz of the TPU's instruction bundles, None for GPUs. See `CLOCK_NOTE`.
        cores: tensor cores that work on one device's program (2 on a v5p).
        sources: where the figures are published.
    """

    platform: str
    memory: int
    published_memory: int
    bandwidth: float
    bf16: float
    fp8: float
    int8: float
    node: int
    inner: float
    link: float
    links: int
    clock: float | None
    cores: int
    sources: tuple[str, ...]

    def peak(self, precision: str) -> float:
        """Matmul FLOP/s at "bf16", "fp8" or "int8"; float32 counts as six bf16 passes on a TPU, as TF32 on a GPU."""
        if precision == "float32":
            return self.bf16 / (6 if self.platform == "tpu" else 2)
        return getattr(self, precision)


CLOCK_NOTE = (
    "No maker's page gives a TPU's clock. It follows from the bf16 peak and the FLOPs of a cycle: 2 x 128 x 128 x 4 "
    "matrix units a core (v5e, v5p), 4 x 256 x 256 x 2 (v6e, v7x; libtpu's own cycle estimate of a product of 8,192 "
    "squared is 369,231 and 422,142 FLOPs a cycle there, more than 2 x 256 x 256 x 2 would allow)."
)

_TPU7X = "https://docs.cloud.google.com/tpu/docs/tpu7x"
_V5P = "https://docs.cloud.google.com/tpu/docs/v5p"
_V5E = "https://docs.cloud.google.com/tpu/docs/v5e"
_V6E = "https://docs.cloud.google.com/tpu/docs/v6e"
_JAX = "jax/_src/pallas/mosaic/tpu_info.py of jax 0.10.2 (int8)"
_NVLINK = (
    "https://raw.githubusercontent.com/mlcommons/inference_results_v4.1/main/closed/NVIDIA/systems/"
    "H200-SXM-141GBx8_TRT_MaxQ.json (NVLink 900 GB/s both ways, 400 Gb/s InfiniBand)"
)
_H100 = "https://glennklockwood.com/garden/processors/h100"

CHIPS = {
    "v5e": Chip(
        platform="tpu",
        memory=int(15.75 * GIB),
        published_memory=16 * GB,
        bandwidth=819 * GB,
        bf16=197 * TERA,
        fp8=197 * TERA,
        int8=393 * TERA,
        node=1,
        inner=0,
        link=400 * GB / 8,
        links=4,
        clock=1.5e9,
        cores=1,
        sources=(_V5E,),
    ),
    "v5p": Chip(
        platform="tpu",
        memory=int(95.74 * GIB),
        published_memory=95 * GIB,
        bandwidth=2765 * GB,
        bf16=459 * TERA,
        fp8=459 * TERA,
        int8=918 * TERA,
        node=1,
        inner=0,
        link=1200 * GB / 12,
        links=6,
        clock=1.75e9,
        cores=2,
        sources=(_V5P, _TPU7X, _JAX),
    ),
    "v6e": Chip(
        platform="tpu",
        memory=int(31.25 * GIB),
        published_memory=32 * GB,
        bandwidth=1638 * GB,
        bf16=918 * TERA,
        fp8=918 * TERA,
        int8=1836 * TERA,
        node=1,
        inner=0,
        link=800 * GB / 8,
        links=4,
        clock=1.75e9,
        cores=1,
        sources=(_V6E, _TPU7X),
    ),
    # Figures of the chip halved, but for `link`: both devices share the chip's six. Between them: six times a link.
    "v7x": Chip(
        platform="tpu",
        memory=int(94.75 * GIB),
        published_memory=96 * GIB,
        bandwidth=7380 * GB / 2,
        bf16=2307 * TERA / 2,
        fp8=4614 * TERA / 2,
        int8=2307 * TERA / 2,
        node=2,
        inner=6 * 1200 * GB / 12,
        link=1200 * GB / 12,
        links=6,
        clock=2.2e9,
        cores=1,
        sources=(_TPU7X,),
    ),
    "h100": Chip(
        platform="cuda",
        memory=int(0.95 * 80 * GB),
        published_memory=80 * GB,
        bandwidth=3350 * GB,
        bf16=989.4 * TERA,
        fp8=1978.9 * TERA,
        int8=1978.9 * TERA,
        node=8,
        inner=450 * GB,
        link=50 * GB,
        links=8,
        clock=None,
        cores=1,
        sources=(_H100, _NVLINK),
    ),
    "h200": Chip(
        platform="cuda",
        memory=int(0.95 * 141 * GB),
        published_memory=141 * GB,
        bandwidth=4800 * GB,
        bf16=989.4 * TERA,
        fp8=1978.9 * TERA,
        int8=1978.9 * TERA,
        node=8,
        inner=450 * GB,
        link=50 * GB,
        links=8,
        clock=None,
        cores=1,
        sources=(
            "https://itkb.uw.cz/2026/06/nvidia-h200-vs-b300-precisions-cores.html",
            _NVLINK,
        ),
    ),
    "b200": Chip(
        platform="cuda",
        memory=int(0.95 * 180 * GB),
        published_memory=180 * GB,
        bandwidth=8000 * GB,
        bf16=2250 * TERA,
        fp8=4500 * TERA,
        int8=4500 * TERA,
        node=8,
        inner=900 * GB,
        link=50 * GB,
        links=8,
        clock=None,
        cores=1,
        sources=(
            "https://docs.vultr.com/inference-cookbook/cuda/getting-started/hardware-overview (HBM, FP8, NVLink)",
            "https://fibermall.com/blog/?p=17161 (HGX B200: rates with sparsity, halved)",
            "https://raw.githubusercontent.com/mlcommons/inference_results_v6.0/main/closed/Nebius/systems/"
            "nebius_b200_n1.json (180 GB, 400 Gb/s)",
        ),
    ),
}

# What `jax.Device.device_kind` says of a chip begins with, or holds, one of these.
_KINDS = {
    "TPU v5 lite": "v5e",
    "TPU v5e": "v5e",
    "TPU v5p": "v5p",
    "TPU v5": "v5p",
    "TPU v6": "v6e",
    "TPU7x": "v7x",
    "TPU v7": "v7x",
    "A100": "a100",
    "H100": "h100",
    "H200": "h200",
    "B200": "b200",
}


def chip_of(device_kind: str) -> Chip | None:
    """The figures of a device by what jax calls its kind; None for what is not in the table, as a CPU."""
    name = next((name for spelled, name in _KINDS.items() if spelled in device_kind), None)
    return CHIPS.get(name) if name is not None else None
