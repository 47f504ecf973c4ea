"""What a plan is made for, checked before anything heavy."""

import dataclasses
import functools
import runpy
from pathlib import Path

from dsv41_jax.config import ModelConfig, load_config
from dsv41_jax.sharding import Layout, check_layout, padded_rows
from dsv41_jax.topologies import Topology, parse
from dsv41_jax.training.train_settings import FRESH, TrainSettings

PHASES = ("decode", "prefill", "verify", "train")
ENGRAM = ("device", "host")
STORAGE = ("fp4", "fp8", "bf16")
# What of a request `sharded_step.abstract_step` is told.
STEP_OPTIONS = ("phase", "batch", "context", "engram", "expert_storage", "block")
VERIFY_TOKENS = 8  # the block in which an anchor and its drafts are verified


@dataclasses.dataclass(frozen=True)
class Request:
    """One step on one topology.

    Attributes:
        topology: spelled name. config: path of a configuration.
        phase: "decode" (a token of every row), "prefill" (the encoder on `block` tokens of every row), "verify" (a
            block of an anchor and drafts, all logits) or "train" (a step on `batch` samples of `context` tokens).
        batch: rows of all devices together. context: tokens that each row's cache has and holds.
        mesh: "DATAxCONTEXTxTENSOR" as `sharding.Layout` spells it, or None: chosen by `default_layout`.
        engram: where the Engram tables are. expert_storage: form of the routed experts.
        schedule: whether the TPU compiler's schedule is dumped and read, for the bound of the vector unit.
        hlo: a folder that gets the optimised program's text, or None.
    """

    topology: str
    config: str = "configs/flash.py"
    phase: str = "decode"
    batch: int = 64
    context: int = 16384
    block: int = 512
    mesh: str | None = None
    engram: str = "device"
    expert_storage: str = "fp4"
    schedule: bool = False
    hlo: str | None = None

    @property
    def machine(self) -> Topology:
        """The topology itself."""
        return parse(self.topology)

    @property
    def training(self) -> TrainSettings | None:
        """The settings, where `config` is that of a training run: its batch and length count, not the request's."""
        return training_settings(self.config)

    @property
    def model(self) -> ModelConfig:
        """The model's configuration, of a training run the one it begins with.

        Raises:
            FileNotFoundError: no such file. ValueError: a training run that begins with a folder.
        """
        settings = self.training
        if settings is None:
            return load_config(self.config)
        if not settings.model.startswith(FRESH):
            raise ValueError(f"{self.config}: model={settings.model!r}; a plan needs fresh:CONFIG, the model's sizes")
        return load_config(settings.model.removeprefix(FRESH))

    @property
    def layout(self) -> Layout:
        """The mesh of a checked request."""
        return Layout.parse(self.mesh)

    @property
    def rows(self) -> int:
        """Rows that a device's cache has, those without a sequence included."""
        return padded_rows(self.batch, self.layout) // (self.layout.data * self.layout.tensor)

    @property
    def tokens(self) -> int:
        """Tokens of a row in one step."""
        return {"decode": 1, "verify": VERIFY_TOKENS, "prefill": self.block, "train": self.context}[self.phase]

    def checked(self) -> "Request":
        """This request with its mesh filled in.

        Raises:
            ValueError: anything that cannot be planned; says what would do. FileNotFoundError: no such configuration.
        """
        machine, config = self.machine, self.model
        if self.training is not None:
            if self.phase != "train":
                raise ValueError(
                    f"phase={self.phase!r}: {self.config} is a training run's; give the model's own config"
                )
            data = self.training.data
            return dataclasses.replace(self, batch=data.batch, context=data.length)._with_mesh(machine, config)
        for name, allowed in (("phase", PHASES), ("engram", ENGRAM), ("expert_storage", STORAGE)):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name}={getattr(self, name)!r} is unknown; choose one of {', '.join(allowed)}")
        for name in ("batch", "context", "block"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be positive")
        limit = config.max_position_embeddings
        if self.context > limit:
            raise ValueError(f"context={self.context} is more than the model's {limit} positions")
        if self.phase == "prefill" and self.block > self.context:
            raise ValueError(f"block={self.block} is longer than the context of {self.context} tokens")
        if self.schedule and not machine.tpu:
            raise ValueError("schedule: only the TPU compiler writes its schedule down; leave it out for GPUs")
        return self._with_mesh(machine, config)

    def _with_mesh(self, machine: Topology, config: ModelConfig) -> "Request":
        mesh = self.mesh or str(default_layout(machine, config, self.batch))
        return dataclasses.replace(self, topology=machine.name, mesh=str(layout_of(mesh, machine, config)))


@functools.lru_cache(maxsize=8)
def training_settings(path: str) -> TrainSettings | None:
    """The settings of a training run's config file; None for any other file."""
    if Path(path).suffix != ".py" or not Path(path).is_file():
        return None
    values = runpy.run_path(path)["get_config"]().to_dict()
    if "data" not in values:
        return None
    return TrainSettings.of(values)


def layout_of(text: str, machine: Topology, config: ModelConfig) -> Layout:
    """The layout of a mesh as spelled ("16x1x4").

    Raises:
        ValueError: another form, not all devices of the machine, or a model that it does not suit.
    """
    layout = Layout.parse(text)
    if layout.devices != machine.devices:
        raise ValueError(
            f"mesh {layout} has {layout.devices} devices, but {machine.name} has {machine.devices}: "
            "data x context x tensor must be all of them"
        )
    check_layout(config, layout)
    return layout


def layouts(machine: Topology, config: ModelConfig) -> list[Layout]:
    """Every layout of a machine's devices that suits the model."""
    found = []
    for tensor in range(1, machine.devices + 1):
        for context in range(1, machine.devices // tensor + 1):
            try:
                text = f"{machine.devices // tensor // context}x{context}x{tensor}"
                found.append(layout_of(text, machine, config))
            except ValueError:
                continue
    return found


def default_layout(machine: Topology, config: ModelConfig, batch: int) -> Layout:
    """The rule: as few devices without a row of their own as possible, then the fewest copies of caches (context), then
    dense matrices split as far as attention's head groups allow, but within a host of GPUs.
    """
    allowed = layouts(machine, config)
    near = [layout for layout in allowed if machine.tpu or layout.tensor <= machine.shape[1]]

    def preference(layout: Layout) -> tuple:
        idle = padded_rows(batch, layout) - batch if batch < layout.data * layout.tensor else 0
        return idle, layout.context, -layout.tensor

    return min(near or allowed, key=preference)
