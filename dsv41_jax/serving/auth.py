"""API keys, where there are any, and who a request comes from."""

import hashlib
import hmac
import os
from collections.abc import Sequence
from pathlib import Path

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from dsv41_jax.serving.api_errors import ApiError, error_response
from dsv41_jax.serving.metrics import Metrics
from dsv41_jax.serving.settings import ServeSettings

KEYS_VARIABLE = "DSV41_API_KEYS"
# Liveness and readiness are asked by machines without keys; the page's files hold nothing, and ask for a key.
_OPEN = ("/health", "/ready", "/")
_OPEN_UNDER = "/page/"


def load_keys(settings: ServeSettings) -> tuple[str, ...]:
    """The keys of `api_key_file`, one a line, and of the environment, separated by commas; none: anyone may ask.

    Raises:
        ValueError: a file without a key, or a key with characters that no header can carry. OSError: no such file.
    """
    keys = os.environ.get(KEYS_VARIABLE, "").split(",")
    if settings.api_key_file is not None:
        lines = Path(settings.api_key_file).read_text(encoding="utf-8").splitlines()
        lines = [line for line in lines if line.strip() and not line.startswith("#")]
        if not lines:
            raise ValueError(f"api_key_file={settings.api_key_file!r} holds no key")
        keys += lines
    keys = [key.strip() for key in keys if key.strip()]
    if not all(key.isascii() and key.isprintable() and " " not in key for key in keys):
        raise ValueError("an API key may hold printable ASCII characters only, and no space")
    return tuple(dict.fromkeys(keys))


class ApiKeys:
    """Lets requests with a key through, and notes whose they are (`tenant_of`). Without keys everything passes."""

    def __init__(self, app: ASGIApp, keys: Sequence[str], metrics: Metrics):
        self._app, self._metrics = app, metrics
        self._keys = [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path = scope["path"]
        client = scope.get("client")
        tenant = client[0] if client else ""
        if self._keys and path not in _OPEN and not path.startswith(_OPEN_UNDER):
            given = _given(Headers(scope=scope))
            # Against all, and to the end: the time tells nothing of which is right.
            matches = [hmac.compare_digest(given, key) for key in self._keys]
            if not any(matches):
                self._metrics.rejected("unauthorized")
                message = "this server needs an API key: Authorization: Bearer KEY, or x-api-key: KEY"
                error = ApiError(401, message, "invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
                await error_response(path, error)(scope, receive, send)
                return
            tenant = hashlib.sha256(given).hexdigest()[:16]
        scope.setdefault("state", {})["tenant"] = tenant
        await self._app(scope, receive, send)


def tenant_of(scope: Scope) -> str:
    """Whose request it is: a digest of the key, or the client's address where there are no keys."""
    return scope.get("state", {}).get("tenant", "")


def _given(headers: Headers) -> bytes:
    scheme, _, token = headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not token.strip():
        token = headers.get("x-api-key", "")
    return token.strip().encode("latin-1", "replace")
