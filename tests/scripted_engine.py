"""An engine that writes given texts, and a server around it: the APIs without a model."""

import contextlib
import dataclasses
import functools
import logging
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anthropic
import httpx
import numpy as np
import openai
import uvicorn

from dsv41_jax.completion import GeneratedToken, TokenLogprob
from dsv41_jax.config import ModelConfig, VisionConfig
from dsv41_jax.serving.http import make_app
from dsv41_jax.serving.limits import uvicorn_options
from dsv41_jax.serving.metrics import Metrics
from dsv41_jax.serving.request import Ended, EngineState, GenerationRequest, NotServing, RequestError
from dsv41_jax.serving.settings import ServeSettings
from dsv41_jax.tokenizer import Tokenizer

DEMO = Path(__file__).parents[1] / "dsv41_jax" / "demo_model"
_CONTROL = re.compile("(<｜[^<>｜]*｜>|</?think>|｜DSML｜)")
VISION = VisionConfig(
    num_hidden_layers=1,
    hidden_size=32,
    num_attention_heads=2,
    intermediate_size=32,
    patch_size=14,
    rope_theta=10000.0,
    downsample_ratio=3,
    max_image_tokens=64,
    min_pixels=42 * 42,
)


@functools.cache
def demo_tokenizer() -> Tokenizer:
    return Tokenizer.from_folder(DEMO)


@functools.cache
def demo_config(images: bool = False) -> ModelConfig:
    """The demo model's, with a vision tower on request."""
    config = ModelConfig.from_json(DEMO)
    return dataclasses.replace(config, vision=VISION) if images else config


def token_ids(text: str, by_bytes: bool = False) -> list[int]:
    """Ids of an answer, control tokens by name; `by_bytes`: one token a byte, so that every character is split."""
    tokenizer, ids = demo_tokenizer(), []
    for part in _CONTROL.split(text):
        if tokenizer.is_control(part):
            ids.append(tokenizer.token_id(part))
        elif by_bytes:
            ids += [_byte_tokens()[byte] for byte in part.encode()]
        else:
            ids += tokenizer.encode(part)
    return ids


@functools.cache
def _byte_tokens() -> dict[int, int]:
    tokenizer = demo_tokenizer()
    return {raw[0]: i for i in range(len(tokenizer)) if len(raw := tokenizer.token_bytes(i)) == 1}


@dataclasses.dataclass(frozen=True)
class Script:
    """What one request's answer is.

    Attributes:
        text: control tokens by name. by_bytes: one token a byte. ending: "stop", or "failed" or "hang" after the text.
        before: called before each token with its number. cached: tokens of the prompt that are said to be kept.
    """

    text: str = "</think>Fine."
    by_bytes: bool = False
    ending: str = "stop"
    before: Callable[[int], None] | None = None
    cached: int = 0


class ScriptedEngine:
    """A `request.Engine`: request i gets the i-th script, and the last one for ever.

    Attributes:
        requests: all that were submitted. ended: (request, how). cancelled: ids that were cancelled while running.
        refuse: raised by `submit` where it is set. obedient: whether a script that a constraint forbids fails.
    """

    def __init__(self, *scripts: Script | str):
        self.scripts = [Script(script) if isinstance(script, str) else script for script in scripts] or [Script()]
        self.requests: list[GenerationRequest] = []
        self.ended: list[tuple[GenerationRequest, Ended]] = []
        self.cancelled: list[str] = []
        self.refuse: Exception | None = None
        self.ready = self.obedient = True
        self._running: dict[str, threading.Event] = {}
        self._lock = threading.Lock()

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        if self.refuse is not None:
            raise self.refuse
        if not self.ready:
            raise NotServing("not ready")
        for request in requests:
            if len(request.token_ids) + request.max_new_tokens > demo_config().max_position_embeddings:
                raise RequestError("too long")
        with self._lock:
            for request in requests:
                script = self.scripts[min(len(self.requests), len(self.scripts) - 1)]
                self.requests.append(request)
                stop = self._running[request.request_id] = threading.Event()
                threading.Thread(target=self._write, args=(request, script, stop), daemon=True).start()

    def cancel(self, request_id: str) -> None:
        with self._lock:
            if request_id in self._running:
                self.cancelled.append(request_id)
                self._running[request_id].set()

    def state(self) -> EngineState:
        with self._lock:
            zeros = dict.fromkeys((field.name for field in dataclasses.fields(EngineState)), 0)
            return EngineState(**zeros | {"writing": len(self._running), "rows": 16})

    def wait_ended(self, count: int, seconds: float = 5.0) -> None:
        """Until so many requests have ended."""
        until = time.monotonic() + seconds
        while len(self.ended) < count:
            assert time.monotonic() < until, f"{len(self.ended)} of {count} requests have ended"
            time.sleep(0.002)

    def _write(self, request: GenerationRequest, script: Script, stop: threading.Event) -> None:
        try:
            reason, tokens, message = self._tokens(request, script, stop)
        except AssertionError as error:
            reason, tokens, message = "failed", 0, str(error)
        ended = Ended(reason, len(request.token_ids), tokens, script.cached, message)
        with self._lock:
            del self._running[request.request_id]
        request.sink.done(ended)
        self.ended.append((request, ended))

    def _tokens(self, request: GenerationRequest, script: Script, stop: threading.Event) -> tuple[str, int, str]:
        ids = token_ids(script.text, script.by_bytes)
        for i, token_id in enumerate(ids):
            if script.before is not None:
                script.before(i)
            if stop.is_set():
                return "cancelled", i, ""
            if request.deadline is not None and time.monotonic() > request.deadline:
                return "deadline", i, "it took too long"
            if token_id in request.stop_ids:
                return "stop", i, ""
            if self.obedient:
                _follow(request, token_id)
            logprob = None
            if request.logprobs is not None:
                top = ((token_id, -0.25), (9, float("-inf")), *((i, -2.0) for i in range(100, 120)))
                logprob = TokenLogprob(token_id, -0.25, top[: request.logprobs])
            if request.sink.token(GeneratedToken(7, token_id, logprob)):
                return "stop", i + 1, ""
            if i + 1 == request.max_new_tokens:
                return "length", i + 1, ""
        if script.ending == "hang":
            left = None if request.deadline is None else request.deadline - time.monotonic()
            return ("cancelled" if stop.wait(left) else "deadline"), len(ids), "it took too long"
        if script.ending == "failed":
            return "failed", len(ids), "a device is on fire"
        return "stop", len(ids), ""


def _follow(request: GenerationRequest, token_id: int) -> None:
    """Go along with a constraint; AssertionError for a token that it forbids."""
    if request.constraint is None:
        return
    mask = np.zeros(-(-demo_config().vocab_size // 32), np.int32)
    if request.constraint.fill(mask):
        allowed = mask.view(np.uint32)[token_id // 32] >> (token_id % 32) & 1
        assert allowed, f"the constraint forbids {demo_tokenizer().name(token_id)!r}"
    request.constraint.advance(token_id)


class Constraints:
    """Notes what it was asked for and allows everything."""

    def __init__(self) -> None:
        self.made: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def make(*args: Any, **options: Any) -> Any:
            self.made.append((name, *args, options))
            return SimpleNamespace(fill=lambda mask: False, advance=lambda token_id: None)

        return make


# Without `verify=False` each client reads the system's certificates, which takes longer than most tests.


def openai_client(server: SimpleNamespace, api_key: str = "none") -> openai.OpenAI:
    http_client = openai.DefaultHttpxClient(verify=False)
    return openai.OpenAI(base_url=server.url + "/v1", api_key=api_key, max_retries=0, http_client=http_client)


def anthropic_client(server: SimpleNamespace, api_key: str = "none") -> anthropic.Anthropic:
    http_client = anthropic.DefaultHttpxClient(verify=False)
    return anthropic.Anthropic(base_url=server.url, api_key=api_key, max_retries=0, http_client=http_client)


class _Errors(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


@contextlib.contextmanager
def serve(
    engine: ScriptedEngine, constraints: Any = None, images: bool = False, errors: int = 0, **settings: Any
) -> Iterator[SimpleNamespace]:
    """A server on a free port: its url, port, and a client. `errors`: how many lines at error level it logs."""
    settings = ServeSettings(**{"model": "demo", "max_len": 4096, "default_max_tokens": 256} | settings)
    model = SimpleNamespace(config=demo_config(images), tokenizer=demo_tokenizer())
    metrics = Metrics()
    metrics.attach(engine)
    app = make_app(engine, model, settings, Constraints() if constraints is None else constraints, metrics)
    config = uvicorn.Config(app, host="127.0.0.1", port=0, **uvicorn_options(settings), timeout_graceful_shutdown=1)
    server, seen = uvicorn.Server(config), _Errors()
    thread = threading.Thread(target=server.run, daemon=True)
    logging.getLogger().addHandler(seen)
    try:
        thread.start()
        until = time.monotonic() + 10
        while not server.started:
            assert time.monotonic() < until and thread.is_alive(), "the server does not start"
            time.sleep(0.005)
        port = server.servers[0].sockets[0].getsockname()[1]
        url = f"http://127.0.0.1:{port}"
        with httpx.Client(base_url=url, verify=False, timeout=20) as client:
            yield SimpleNamespace(url=url, port=port, http=client)
    finally:
        server.should_exit = True
        thread.join(10)
        logging.getLogger().removeHandler(seen)
    assert len(seen.records) == errors, [record.getMessage() for record in seen.records]
