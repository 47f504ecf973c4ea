"""A server's life: check, listen, load, warm up, serve, drain.

The socket is bound before anything is loaded, and `/health` answers from then on; `/ready` and the API say 503 until
everything is compiled. On SIGTERM or SIGINT nothing new is taken, what runs may end within `drain_seconds`, and the
process exits with 0; a second signal ends it at once. If the engine breaks, the process exits with 1.
"""

import dataclasses
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import NoReturn

import jax
import uvicorn

from dsv41_jax import numerics as numerics_module
from dsv41_jax.checkpoint.open_folder import open_folder
from dsv41_jax.distributed import Processes
from dsv41_jax.generate import Model
from dsv41_jax.load import implementation_of, load
from dsv41_jax.mesh_layout import Layout
from dsv41_jax.model_folder import find_folder
from dsv41_jax.pages import PAGE_TOKENS
from dsv41_jax.serving import memory
from dsv41_jax.serving.auth import load_keys
from dsv41_jax.serving.constraints import Constraints
from dsv41_jax.serving.door import Door
from dsv41_jax.serving.engine import ServingEngine
from dsv41_jax.serving.executor import CacheSize, Executor
from dsv41_jax.serving.followers import Leader, follow
from dsv41_jax.serving.http import make_app
from dsv41_jax.serving.limits import uvicorn_options
from dsv41_jax.serving.loop import Loop
from dsv41_jax.serving.metrics import Metrics
from dsv41_jax.serving.scheduler import Scheduler
from dsv41_jax.serving.settings import ServeSettings
from dsv41_jax.serving.warm_up import warm_up

_log = logging.getLogger(__name__)
_FLUSH_SECONDS = 5  # for the last bytes of answers that are done
_FOLLOWER_SECONDS = 600.0  # one host may load and compile so much longer than another


def serve(settings: ServeSettings, processes: Processes) -> int:
    """Serve until a signal comes; every process of a run calls it. Returns the exit code.

    Raises:
        ValueError, OSError: anything wrong with settings, model, mesh or memory, before it is loaded.
    """
    layout = None if settings.mesh is None else Layout.parse(settings.mesh)
    if processes.count > 1 and layout is None:
        raise ValueError(f"{processes.count} processes need a mesh over their {jax.device_count()} devices")
    mesh = None if layout is None else layout.mesh()
    load_keys(settings)  # a file that is missing is said now
    size, plan = planned(settings, mesh)
    if processes.index > 0:
        return _follow(settings, mesh, size, processes)
    print(plan, file=sys.stderr)
    with _listen(settings) as listener:
        return _Server(settings, listener, size, processes).run(lambda: _load(settings, mesh))


def planned(settings: ServeSettings, mesh: jax.sharding.Mesh | None) -> tuple[CacheSize, memory.MemoryPlan]:
    """The cache, and the bytes of a device; ValueError where the settings do not fit the model or the memory."""
    numerics = numerics_module.named(settings.numerics)
    numerics = numerics.computed_by(implementation_of(settings.implementation, numerics))
    config = open_folder(find_folder(settings.model, settings.revision)).config
    size = memory.cache_size(settings, config, numerics, mesh)
    plan = memory.plan_memory(
        config,
        numerics,
        size,
        mesh,
        engram=settings.engram,
        expert_storage=settings.expert_storage,
        block=settings.prefill_block,
        dispatch=settings.dispatch,
    )
    memory.check_memory(plan)
    return size, plan


def _load(settings: ServeSettings, mesh: jax.sharding.Mesh | None) -> Model:
    return load(
        settings.model,
        mesh,
        numerics=settings.numerics,
        engram=settings.engram,
        expert_storage=settings.expert_storage,
        implementation=settings.implementation,
        revision=settings.revision,
        dispatch=settings.dispatch,
    )


def _follow(settings: ServeSettings, mesh: jax.sharding.Mesh, size: CacheSize, processes: Processes) -> int:
    """Another process than the first: it ends when that one does, not by a signal that all of a pod get."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: _log.warning("process 0 decides when this server ends"))
    executor = Executor(_load(settings, mesh)._runner, size, settings.prefill_block, settings.decode_rows)
    follow(processes, executor, _FOLLOWER_SECONDS)
    return 0


def _listen(settings: ServeSettings) -> socket.socket:
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    try:
        return socket.create_server((settings.host, settings.port), family=family, backlog=1024)
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        raise OSError(f"cannot listen at {settings.host} port {settings.port}: {reason}") from error


class _Server:
    """Process 0."""

    def __init__(self, settings: ServeSettings, listener: socket.socket, size: CacheSize, processes: Processes):
        self.settings, self.listener, self.size = settings, listener, size
        self.processes = processes
        self._door = Door()
        self._end = threading.Event()
        self._engine: ServingEngine | None = None
        self._leader: Leader | None = None
        self._error: BaseException | None = None
        self._broken = False
        options = uvicorn_options(settings) | {"timeout_graceful_shutdown": _FLUSH_SECONDS}
        self._http = uvicorn.Server(uvicorn.Config(self._door, **options))

    def run(self, load_model: Callable[[], Model]) -> int:
        """From the first signal handler to the exit code. Work is done by other threads: a signal is never kept waiting
        by a compiler.
        """
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._signal)
        http = threading.Thread(target=self._serve_http, name="http", daemon=True)
        http.start()
        threading.Thread(target=self._begin, args=(load_model,), name="start", daemon=True).start()
        try:
            self._end.wait()
            if self._error is not None:
                raise self._error
            if self._engine is None:
                self._give_up()
            self._drain(self._engine)
        finally:
            if self._engine is not None:
                self._engine.stop()
            if self._leader is not None:
                self._leader.end()
            self._http.should_exit = True
            http.join(_FLUSH_SECONDS + 2)
        return 1 if self._broken else 0

    def _serve_http(self) -> None:
        try:
            self._http.run(sockets=[self.listener])
        finally:
            if not self._http.should_exit:
                self._failed(RuntimeError("HTTP ended by itself"))

    def _begin(self, load_model: Callable[[], Model]) -> None:
        try:
            model = load_model()
            model.require_tokenizer()
            executor = Executor(model._runner, self.size, self.settings.prefill_block, self.settings.decode_rows)
            if self.processes.count > 1:
                self._leader = Leader(self.processes, executor, _FOLLOWER_SECONDS)
            self._engine = self._start(model, executor)
        except BaseException as error:
            self._error = error
            self._end.set()

    def _give_up(self) -> NoReturn:
        """A signal came before the server was ready: end at once, whatever the compiler is doing."""
        text = "serve: ended by a signal before it was ready"
        if self.processes.count > 1:
            raise SystemExit(text)  # the other hosts are told
        print(text, file=sys.stderr, flush=True)
        os._exit(0)

    def _start(self, model: Model, executor: Executor) -> ServingEngine:
        settings, metrics = self.settings, Metrics()
        run = executor.run if self._leader is None else self._leader.run
        scheduler = Scheduler(self.size, settings.reserve_tokens)
        loop = Loop(executor, scheduler, metrics, settings.max_stall_ms / 1000, run)
        block = warm_up(loop)
        if block * 1000 > settings.max_stall_ms:
            _log.warning(
                "a block of %d tokens takes %.0f ms, longer than max_stall_ms=%g: texts wait that long; give a "
                "smaller prefill_block",
                *(executor.block, block * 1000, settings.max_stall_ms),
            )
        engine = ServingEngine(loop, settings.max_queued, self._failed)
        metrics.attach(engine)
        config = model.config
        constraints = Constraints(model.require_tokenizer(), config.vocab_size, config.eos_token_id)
        room = self.size.pages * PAGE_TOKENS  # of one request: it lies on one device
        if room < settings.max_len:
            _log.warning("a request can have %d tokens, as many as a device has pages for", room)
            settings = dataclasses.replace(settings, max_len=room)
        self._door.app = make_app(engine, model, settings, constraints, metrics)
        engine.start()
        host, port = self.listener.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        print(f"ready: http://{shown}:{port}", file=sys.stderr, flush=True)
        return engine

    def _drain(self, engine: ServingEngine) -> None:
        state = engine.state()
        running = state.waiting + state.reading + state.writing
        _log.warning("ending: %d requests may go on for %g s", running, self.settings.drain_seconds)
        if not engine.drain(self.settings.drain_seconds):
            _log.warning("requests are cut off after %g s", self.settings.drain_seconds)

    def _failed(self, error: BaseException) -> None:
        self._broken = True
        self._end.set()

    def _signal(self, number: int, frame: FrameType | None) -> None:
        if self._end.is_set():
            raise SystemExit("serve: ended by a second signal")
        self._end.set()
