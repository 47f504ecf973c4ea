"""What a server says of itself, and its tokenizer: models, tokenize, detokenize, health, metrics, state, the page."""

import asyncio
import dataclasses
import mimetypes
import time
from collections.abc import Callable
from concurrent.futures import Executor
from importlib import resources
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from dsv41_jax.arguments import check_ids, check_text
from dsv41_jax.serving.api_errors import ApiError
from dsv41_jax.serving.chat_job import ChatJobs
from dsv41_jax.serving.limits import read_body
from dsv41_jax.serving.metrics import Metrics
from dsv41_jax.serving.options import Served, check_model, read_json, text_ids
from dsv41_jax.serving.request import Engine

_NO_SNIFFING = {
    "x-content-type-options": "nosniff",
    "content-security-policy": "default-src 'self'; img-src 'self' data: blob:; frame-ancestors 'none'",
}


class Service:
    """Endpoints beside the APIs that write text."""

    def __init__(self, engine: Engine, served: Served, metrics: Metrics, chat: ChatJobs, messages: ChatJobs, workers):
        self._engine, self._served, self._metrics = engine, served, metrics
        self._chat, self._messages = chat, messages
        self._workers: Executor = workers
        self._created = int(time.time())

    async def health(self, request: Request) -> Response:
        return JSONResponse({"status": "alive"})

    async def ready(self, request: Request) -> Response:
        ready = self._engine.ready
        return JSONResponse({"ready": ready}, 200 if ready else 503)

    async def metrics(self, request: Request) -> Response:
        body, kind = await self._in_thread(self._metrics.render)
        return Response(body, headers={"content-type": kind})

    async def state(self, request: Request) -> Response:
        return JSONResponse(dataclasses.asdict(await self._in_thread(self._engine.state)))

    async def models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._model()], "has_more": False})

    async def model(self, request: Request) -> Response:
        check_model(self._served, {"model": request.path_params["name"]})
        return JSONResponse(self._model())

    def _model(self) -> dict[str, Any]:
        """In the shapes of OpenAI and Anthropic at once."""
        created = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self._created))
        return {
            "id": self._served.name,
            "object": "model",
            "created": self._created,
            "owned_by": "dsv41-jax",
            "max_model_len": self._served.max_len,
            "type": "model",
            "display_name": self._served.name,
            "created_at": created,
            "images": self._served.config.vision is not None,
        }

    async def tokenize(self, request: Request) -> Response:
        """{"prompt"} or a chat request's fields -> {"tokens", "count", "max_model_len"}. A prompt begins with the
        beginning-of-sequence token, as /v1/completions reads it; not with "add_special_tokens": false.
        """
        data = await read_body(request, self._served.settings)
        body = await self._in_thread(lambda: read_json(data))
        if body.get("model") is not None:
            check_model(self._served, body)
        if "messages" in body:
            chat = dict(body) | {"model": self._served.name}
            ids = (await self._chat.encode(chat)).tolist()
        else:
            text = _client(lambda: check_text("prompt", body.get("prompt"), empty=True))
            special = body.get("add_special_tokens", True)
            if not isinstance(special, bool):
                raise ApiError(400, "add_special_tokens: true or false is needed", param="add_special_tokens")
            tokenizer = self._served.tokenizer
            ids = await self._in_thread(lambda: text_ids(tokenizer, text) if special else tokenizer.encode(text))
        return JSONResponse({"tokens": ids, "count": len(ids), "max_model_len": self._served.max_len})

    async def detokenize(self, request: Request) -> Response:
        """{"tokens"} -> {"prompt"}, control tokens by name."""
        data = await read_body(request, self._served.settings)
        body = await self._in_thread(lambda: read_json(data))
        tokens = body.get("tokens")
        if not isinstance(tokens, list) or not all(type(token) is int for token in tokens):
            raise ApiError(400, "tokens: a list of token ids is needed", param="tokens")
        ids = _client(lambda: check_ids(self._served.config, tokens, 1, "tokens")) if tokens else []
        text = await self._in_thread(lambda: self._served.tokenizer.decode(ids, keep_control=True))
        return JSONResponse({"prompt": text})

    async def count_tokens(self, request: Request) -> Response:
        """The Messages API's /v1/messages/count_tokens."""
        data = await read_body(request, self._served.settings)
        body = await self._in_thread(lambda: read_json(data))
        return JSONResponse({"input_tokens": len(await self._messages.encode(body))})

    async def page(self, request: Request) -> Response:
        """A file of the page in the package."""
        name = request.path_params.get("file", "index.html")
        folder = resources.files("dsv41_jax.serving").joinpath("page")
        for file in folder.iterdir() if folder.is_dir() else ():
            if file.name == name and file.is_file():  # names from the folder, never paths from the client
                kind = mimetypes.guess_type(name)[0] or "application/octet-stream"
                return Response(file.read_bytes(), headers=_NO_SNIFFING, media_type=kind)
        raise ApiError(404, f"there is no page {name!r}")

    async def _in_thread(self, work: Callable[[], Any]) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._workers, work)


def _client(check: Callable[[], Any]) -> Any:
    """A check whose errors are the client's."""
    try:
        return check()
    except (ValueError, TypeError) as error:
        raise ApiError(400, str(error)) from None
