"""One request to /v1/completions, timed; and what a server is asked before any of them."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import json
import time
from typing import Any

from dsv41_jax.load_test.connection import Answer, ProtocolError, Server, exchange
from dsv41_jax.load_test.workload import Planned

_SHOWN = 200  # characters of an error that are kept
# Ordinary text, whose ids make the prompts where no range of ids is given.
_SAMPLE = (
    "The heavens declare the glory of God, and the firmament sheweth his handywork. Call me back at 9:30 on Tuesday; "
    "the invoice (No. 4711) was for $1,250.00. def area(r): return 3.14159 * r ** 2  # square metres\n"
    "Every morning the fishermen of the harbour look at the sky, mend what the night has torn, and talk about prices. "
    "In 1869 a table of sixty-three elements was printed; gaps were left for those that nobody had seen yet."
)


class NotReady(Exception):
    """The server cannot be measured; the message says why and what would help."""


@dataclasses.dataclass(frozen=True)
class Options:
    """What all requests have in common.

    Attributes:
        end_id: id of the end-of-sequence token, which is then biased away, so that answers have their full length; or
            None. timeout: seconds after which a request is given up.
    """

    model: str
    temperature: float = 1.0
    end_id: int | None = None
    timeout: float = 600.0

    def payload(self, planned: Planned) -> dict[str, Any]:
        """The body of a request."""
        bias = {} if self.end_id is None else {"logit_bias": {str(self.end_id): -100}}
        return {
            "model": self.model,
            "prompt": planned.token_ids,
            "max_tokens": planned.shape.output,
            "temperature": self.temperature,
            "seed": planned.seed,
            "stream": True,
            "stream_options": {"include_usage": True},
            **bias,
        }


@dataclasses.dataclass
class Outcome:
    """What became of a request. Times are in seconds since it was due.

    Attributes:
        shape: name of its shape. prompt, asked: tokens of the prompt as sent, and of the answer at most.
        late: when it was sent: more than a few milliseconds mean that this program was too slow, not the server.
        texts: when each event with text came. end: when the answer was complete, or the error came.
        error: kind of error, or None. detail: its text. retry_after: seconds that the server asked to wait, or None.
        finish: "stop" or "length". prompt_tokens, cached_tokens, completion_tokens: by the server's count.
    """

    shape: str
    prompt: int
    asked: int
    late: float = 0.0
    texts: list[float] = dataclasses.field(default_factory=list)
    end: float = 0.0
    error: str | None = None
    detail: str = ""
    retry_after: float | None = None
    finish: str | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0

    @property
    def first(self) -> float:
        """Seconds to the first text; to the end where the answer has none."""
        return self.texts[0] if self.texts else self.end

    @property
    def per_token(self) -> float | None:
        """Seconds of each token after the first, on average; None where there is no second one."""
        more = self.completion_tokens - 1
        return (self.texts[-1] - self.texts[0]) / more if more > 0 and len(self.texts) > 1 else None

    @property
    def gaps(self) -> list[float]:
        """Seconds between events with text. An event can carry several tokens, so there may be fewer than tokens."""
        return [later - earlier for earlier, later in itertools.pairwise(self.texts)]

    @property
    def ended_early(self) -> bool:
        """Whether the model ended the answer before it had the length that was asked for."""
        return self.error is None and self.completion_tokens < self.asked


class _Failed(Exception):
    def __init__(self, kind: str, detail: str = "", retry_after: float | None = None):
        super().__init__(detail)
        self.kind, self.retry_after = kind, retry_after


async def complete(server: Server, options: Options, planned: Planned, due: float | None = None) -> Outcome:
    """Send a request and read its stream. Never raises for what the server does: see `Outcome.error`.

    Args:
        due: `time.perf_counter()` at which it should have been sent; default: now.
    """
    due = time.perf_counter() if due is None else due
    outcome = Outcome(planned.shape.name, len(planned.token_ids), planned.shape.output)
    outcome.late = time.perf_counter() - due
    try:
        async with asyncio.timeout(options.timeout):
            async with exchange(server, "POST", "/v1/completions", options.payload(planned)) as answer:
                await _read(answer, outcome, due)
    except _Failed as failed:
        outcome.error, outcome.detail, outcome.retry_after = failed.kind, str(failed), failed.retry_after
    except TimeoutError:
        outcome.error, outcome.detail = "timeout", f"not complete after {options.timeout:g} s"
    except ProtocolError as error:
        outcome.error, outcome.detail = "broken answer", str(error)
    except OSError as error:
        outcome.error, outcome.detail = "no connection", str(error)
    outcome.detail = outcome.detail[:_SHOWN]
    outcome.end = time.perf_counter() - due
    return outcome


async def _read(answer: Answer, outcome: Outcome, due: float) -> None:
    if answer.status != 200:
        wait = answer.headers.get("retry-after", "")
        text = (await answer.body()).decode(errors="replace")
        raise _Failed(f"HTTP {answer.status}", text, float(wait) if wait.isdigit() else None)
    usage = None
    async for data in answer.events():
        now = time.perf_counter() - due
        if data == "[DONE]":
            break
        try:
            event = json.loads(data)
            if "error" in event:
                raise _Failed("error event", data)
            for choice in event.get("choices", []):
                if choice.get("text"):
                    outcome.texts.append(now)
                outcome.finish = choice.get("finish_reason") or outcome.finish
            usage = event.get("usage") or usage
        except (json.JSONDecodeError, AttributeError, TypeError) as error:
            raise _Failed("broken answer", f"{error}: {data}") from None
    if outcome.finish is None:
        raise _Failed("no finish", "the stream ended without a finish_reason")
    if usage is None:
        raise _Failed("no usage", "the stream has no usage, so tokens cannot be counted")
    outcome.prompt_tokens, outcome.completion_tokens = usage["prompt_tokens"], usage["completion_tokens"]
    outcome.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0


async def ask(server: Server, method: str, path: str, payload: Any = None, timeout: float = 30.0) -> Any:
    """A request whose answer is short, as JSON.

    Raises:
        NotReady: no server, no JSON, or another status than 200.
    """
    where = f"{server.url}{path}"
    try:
        async with asyncio.timeout(timeout), exchange(server, method, path, payload) as answer:
            text = (await answer.body()).decode(errors="replace")
    except TimeoutError:
        raise NotReady(f"{where} has not answered for {timeout:g} s") from None
    except ProtocolError as error:
        raise NotReady(f"{where}: {error}") from None
    except OSError as error:
        start = "start one with: python launch/serve.py --config=configs/serve_demo.py"
        raise NotReady(f"there is no server at {server.url} ({error}); {start}") from None
    if answer.status in (401, 403):
        raise NotReady(f"{where} wants an API key ({answer.status}): give --api_key_file, or DSV41_API_KEYS")
    if answer.status == 503:
        raise NotReady(f"the server at {server.url} is not ready: it is warming up or draining ({text[:_SHOWN]})")
    if answer.status != 200:
        raise NotReady(f"{where} answered {answer.status}, not 200: {text[:_SHOWN]}")
    try:
        return json.loads(text or "null")
    except json.JSONDecodeError:
        raise NotReady(f"{where} answered with something that is not JSON: {text[:_SHOWN]}") from None


async def prepare(server: Server) -> str:
    """Check that the server is ready, and give the name of its model.

    Raises:
        NotReady: it is not.
    """
    await ask(server, "GET", "/ready")
    found = await ask(server, "GET", "/v1/models")
    try:
        return found["data"][0]["id"]
    except (KeyError, IndexError, TypeError):
        raise NotReady(f"{server.url}/v1/models names no model: {json.dumps(found)[:_SHOWN]}") from None


async def text_ids(server: Server, model: str) -> list[int]:
    """Different ids of an ordinary text, by the server's /tokenize.

    Raises:
        NotReady: the server does not tell; --vocab helps.
    """
    found = await ask(server, "POST", "/tokenize", {"model": model, "prompt": _SAMPLE, "add_special_tokens": False})
    ids = found.get("tokens") if isinstance(found, dict) else None
    if not ids or not all(isinstance(each, int) for each in ids):
        raise NotReady(f"{server.url}/tokenize gave no tokens: {json.dumps(found)[:_SHOWN]}; give --vocab=LOW:HIGH")
    return sorted(set(ids))
