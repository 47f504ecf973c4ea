"""What goes wrong with a request, and how each API says so."""

import json
from collections.abc import Mapping
from typing import Any

import deepseek_recipe
from starlette.exceptions import HTTPException
from starlette.responses import Response

from dsv41_jax.serving.request import Ended, NotServing, QueueFull, RequestError

# Statuses by what the APIs call them; every other 4xx is an invalid_request_error, every other 5xx a server's.
_OPENAI_TYPES = {401: "authentication_error", 429: "rate_limit_error", 504: "timeout_error"}
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_MOST_MESSAGE = 1000  # characters
# The words `Metrics.rejected` counts under.
_REASONS = {401: "unauthorized", 408: "slow", 413: "too_large", 429: "queue_full", 503: "not_serving"}


class ApiError(Exception):
    """A request that gets an error for an answer.

    Attributes:
        status: of HTTP. message: for the client's eyes, cut where it quotes too much. code: a short word that programs
            look for. param: the field at fault. headers: of the response.
    """

    def __init__(
        self,
        status: int,
        message: str,
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        super().__init__(message)
        message = message if len(message) <= _MOST_MESSAGE else message[:_MOST_MESSAGE] + " ..."
        self.status, self.message, self.code, self.param, self.headers = status, message, code, param, headers

    @property
    def reason(self) -> str:
        """One of a few words, for metrics."""
        return _REASONS.get(self.status, "bad_request" if self.status < 500 else "failed")

    @property
    def openai_type(self) -> str:
        """The OpenAI APIs' name of such an error."""
        return _OPENAI_TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")


def of_exception(error: Exception) -> ApiError:
    """What a client is told of an exception that is its own fault, or that says "not now"."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, QueueFull):
        return ApiError(429, str(error), "queue_full", headers={"Retry-After": str(max(1, error.retry_after))})
    if isinstance(error, NotServing):
        return ApiError(503, str(error) or "the server is not ready", "not_ready", headers={"Retry-After": "5"})
    if isinstance(error, deepseek_recipe.ConversionError):
        return ApiError(error.status_code, _message_of(error.body))
    if isinstance(error, HTTPException):
        headers = {name: value for name, value in (error.headers or {}).items() if name.lower() == "allow"}
        return ApiError(error.status_code, error.detail, headers=headers)
    if isinstance(error, RequestError | ValueError | TypeError):
        return ApiError(400, str(error))
    raise TypeError(f"{type(error).__name__} is no fault of a client")


def of_ended(ended: Ended) -> ApiError | None:
    """What a client is told of a request that ended without an answer; None where there is one.

    One that ran out of time has an answer if it has a token: what was written, cut off as by max_tokens.
    """
    if ended.reason == "failed":
        return ApiError(500, f"the engine failed: {ended.message}" if ended.message else "the engine failed")
    if ended.reason == "cancelled":
        return ApiError(503, ended.message or "the server ended the request", "cancelled")
    if ended.reason == "deadline" and not ended.completion_tokens:
        return ApiError(504, ended.message or "the request ran out of time before its first token", "timeout")
    return None


def openai_error(error: ApiError) -> dict[str, Any]:
    """The body of an error of the OpenAI APIs."""
    return {
        "error": {
            "message": error.message,
            "type": error.openai_type,
            "param": error.param,
            "code": error.code or ("invalid_request_error" if error.status < 500 else "server_error"),
        }
    }


def anthropic_error(error: ApiError) -> dict[str, Any]:
    """The body of an error of the Messages API."""
    kind = _ANTHROPIC_TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": error.message}}


def error_response(path: str, error: ApiError) -> Response:
    """An error in the shape of the API that a path belongs to."""
    shape = anthropic_error if path.startswith("/v1/messages") else openai_error
    # json.dumps escapes what is not ASCII: a message may quote a lone surrogate of the request.
    return Response(json.dumps(shape(error)), error.status, dict(error.headers or {}), "application/json")


def _message_of(body: str) -> str:
    """The message inside a body that the library wrote."""
    try:
        return json.loads(body)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        return body
