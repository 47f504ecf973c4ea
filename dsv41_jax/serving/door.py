"""What answers HTTP while the model is loaded and compiled: that the process lives, and that it is not ready."""

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from dsv41_jax.serving.api_errors import ApiError, error_response

_WAIT_SECONDS = "10"


async def _health(request: Request) -> Response:
    return JSONResponse({"status": "ok"})


async def _not_ready(request: Request, error: Exception) -> Response:
    headers = {"Retry-After": _WAIT_SECONDS}
    return error_response(request.url.path, ApiError(503, "the model is being loaded", headers=headers))


class Door:
    """An ASGI application that hands everything to `app` once that is set."""

    def __init__(self) -> None:
        self.app: ASGIApp | None = None
        self._meanwhile = Starlette(routes=[Route("/health", _health)], exception_handlers={404: _not_ready})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await (self.app or self._meanwhile)(scope, receive, send)
