"""The HTTP application: routes, and errors in the shape of the API that a path belongs to.

exchange      one request, from its body to its response      api_service   models, tokenize, health, metrics, page
chat_job      a chat API's body to requests for the engine    conversion    ... read by `deepseek-recipe`
api_chat, api_responses, api_messages, api_completions        the APIs' own shapes
answers       tokens to events, in the engine's thread        outbox        from there to the event loop
limits, auth, image_sources                                   what clients may do
"""

import logging
import os
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import deepseek_recipe
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from dsv41_jax.serving.api_chat import ChatShape
from dsv41_jax.serving.api_completions import CompletionJobs
from dsv41_jax.serving.api_errors import ApiError, error_response, of_exception
from dsv41_jax.serving.api_messages import MessagesShape
from dsv41_jax.serving.api_responses import ResponsesShape
from dsv41_jax.serving.api_service import Service
from dsv41_jax.serving.auth import ApiKeys, load_keys
from dsv41_jax.serving.chat_job import ChatJobs
from dsv41_jax.serving.exchange import MakeJob, exchange
from dsv41_jax.serving.image_sources import ImageSources
from dsv41_jax.serving.limits import ClientGone, Refusal
from dsv41_jax.serving.metrics import Metrics
from dsv41_jax.serving.options import ConstraintFactory, Served
from dsv41_jax.serving.request import Engine, NotServing, QueueFull, RequestError
from dsv41_jax.serving.settings import ServeSettings

_LOG = logging.getLogger(__name__)
_WORKERS = 4
_UNREAD = (408, 413, 415)
_CLIENT_ERRORS = (ApiError, HTTPException, RequestError, QueueFull, NotServing, deepseek_recipe.ConversionError)


def served_name(settings: ServeSettings) -> str:
    """The model's name in the API."""
    return settings.served_name or os.path.basename(settings.model.rstrip("/")) or settings.model


def make_app(
    engine: Engine, model: Any, settings: ServeSettings, constraints: ConstraintFactory, metrics: Metrics
) -> Starlette:
    """The application.

    Args:
        model: its `config` and `tokenizer` are used.

    Raises:
        ValueError: a model without a tokenizer, or API keys that cannot be used. OSError: no file of keys.
    """
    if model.tokenizer is None:
        raise ValueError("this model has no tokenizer: a server needs one")
    served = Served(
        name=served_name(settings),
        config=model.config,
        tokenizer=model.tokenizer,
        settings=settings,
        constraints=constraints,
        images=ImageSources(settings),
    )
    workers = ThreadPoolExecutor(_WORKERS, "prepare")
    chat = ChatJobs(served, ChatShape(), workers)
    messages = ChatJobs(served, MessagesShape(), workers)
    service = Service(engine, served, metrics, chat, messages, workers)

    def writes(make_job: MakeJob) -> Callable[[Request], Awaitable[Any]]:
        async def endpoint(request: Request) -> Any:
            return await exchange(request, engine, settings, make_job)

        return endpoint

    async def failed(request: Request, error: Exception) -> Any:
        found = of_exception(error)
        metrics.rejected(found.reason)
        if found.status in _UNREAD:
            return Refusal(request.url.path, found)
        return error_response(request.url.path, found)

    async def broken(request: Request, error: Exception) -> Response:
        metrics.rejected("failed")  # the traceback is logged by the server
        return error_response(request.url.path, ApiError(500, "the server failed"))

    async def gone(request: Request, error: Exception) -> Response:
        return Response(status_code=499)  # nobody reads it

    post, get = ["POST"], ["GET"]
    routes = [
        Route("/v1/chat/completions", writes(chat), methods=post),
        Route("/v1/responses", writes(ChatJobs(served, ResponsesShape(), workers)), methods=post),
        Route("/v1/messages", writes(messages), methods=post),
        Route("/v1/messages/count_tokens", service.count_tokens, methods=post),
        Route("/v1/completions", writes(CompletionJobs(served, workers)), methods=post),
        Route("/v1/models", service.models, methods=get),
        Route("/v1/models/{name:path}", service.model, methods=get),
        Route("/tokenize", service.tokenize, methods=post),
        Route("/detokenize", service.detokenize, methods=post),
        Route("/health", service.health, methods=get),
        Route("/ready", service.ready, methods=get),
        Route("/metrics", service.metrics, methods=get),
        Route("/state", service.state, methods=get),
        Route("/", service.page, methods=get),
        Route("/page/{file}", service.page, methods=get),
    ]
    middleware = [Middleware(ApiKeys, keys=load_keys(settings), metrics=metrics)]
    if settings.cors_origins:
        cors = {"allow_origins": list(settings.cors_origins), "allow_methods": ["GET", "POST"], "allow_headers": ["*"]}
        middleware.insert(0, Middleware(CORSMiddleware, **cors))
    handlers = dict.fromkeys(_CLIENT_ERRORS, failed) | {ClientGone: gone, Exception: broken}
    app = Starlette(routes=routes, middleware=middleware, exception_handlers=handlers)
    app.router.redirect_slashes = False
    return app
