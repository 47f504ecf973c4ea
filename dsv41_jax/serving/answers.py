"""The tokens of one choice of a chat API to its API's events, in the engine's thread."""

import dataclasses
import json
import logging
import time
from typing import Any, Protocol

import deepseek_recipe

from dsv41_jax.chat_parse import SpelledTokens, parser_markers, without_markers
from dsv41_jax.completion import GeneratedToken, TokenLogprob
from dsv41_jax.serving.conversion import Converted
from dsv41_jax.serving.outbox import Outbox
from dsv41_jax.serving.request import Ended
from dsv41_jax.tokenizer import Tokenizer

_LOG = logging.getLogger(__name__)
_Chunk, _Finish = deepseek_recipe.InferenceChunk, deepseek_recipe.InferenceFinishReason
# Line ends to some readers of event streams, though JSON may hold them as they are.
_LINE_ENDS = {code: f"\\u{code:04x}" for code in (0x85, 0x2028, 0x2029)}


@dataclasses.dataclass(frozen=True)
class Usage:
    """Tokens of a request: of the prompt, of those the kept ones, of the answer, and of those the reasoning."""

    prompt: int
    cached: int
    completion: int
    reasoning: int


@dataclasses.dataclass(frozen=True)
class Events:
    """What some tokens of a choice add to a stream."""

    index: int
    data: bytes


@dataclasses.dataclass(frozen=True)
class Done:
    """The end of a choice.

    Attributes:
        data: the last events of a stream. body: where there is no stream, the response as JSON.
    """

    index: int
    request_id: str
    ended: Ended
    usage: Usage
    data: bytes = b""
    body: dict[str, Any] | None = None


class Logprobs:
    """Log probabilities of one choice in OpenAI's shape, taken as they come.

    Attributes:
        content: all of the answer so far, without the reasoning.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._new: dict[bool, list[dict[str, Any]]] = {False: [], True: []}
        self.content: list[dict[str, Any]] = []

    def add(self, logprob: TokenLogprob, in_reasoning: bool) -> None:
        entry = self._entry(logprob.token_id, logprob.logprob)
        entry["top_logprobs"] = [self._entry(*pair) for pair in logprob.top]
        self._new[in_reasoning].append(entry)
        if not in_reasoning:
            self.content.append(entry)

    def take(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """(of the content, of the reasoning) since the last time."""
        new, self._new = self._new, {False: [], True: []}
        return new[False], new[True]

    def _entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        raw = self._tokenizer.token_bytes(token_id)
        # JSON has no infinity; this is what OpenAI writes for it.
        return {"token": raw.decode("utf-8", "replace"), "logprob": max(float(logprob), -9999.0), "bytes": list(raw)}


class AnswerShape(Protocol):
    """How an API writes answers, besides what the library does."""

    response_type: Any

    def generator(self, converted: Converted, request_id: str) -> Any:
        """The library's maker of chunks."""

    def complete(self, event: dict[str, Any], index: int, usage: Usage | None, logprobs: Logprobs | None) -> None:
        """Write into an event of a stream, or into a response, what the library does not know. Usage: at the end."""


def server_sent(name: str | None, data: str) -> bytes:
    """One event of a stream."""
    if not data.isascii():
        data = data.translate(_LINE_ENDS)
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {data}\n\n".encode()


def to_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


class ChatSink:
    """One choice while it is written: a `request.Sink`."""

    def __init__(
        self,
        shape: AnswerShape,
        converted: Converted,
        prompt_tokens: int,
        response_id: str,
        request_id: str,
        index: int,
        outbox: Outbox,
    ):
        options = converted.library_request.parsing_options
        options.special_tokens = parser_markers()
        options.parse_json_output = False  # nothing but the constraint decides what is JSON
        stage = options.thinking_initial_stage
        tokenizer = converted.served.tokenizer
        self._shape, self._index, self._outbox, self._request_id = shape, index, outbox, request_id
        self._tokenizer = tokenizer
        self._logged: list[int] | None = [] if converted.served.settings.log_prompts else None
        self._stream: bool = converted.library_request.stream
        self._tokens = SpelledTokens(tokenizer, stage is not None and stage.starts_in_reasoning())
        self._processor = deepseek_recipe.StreamProcessor(shape.generator(converted, response_id), options)
        self._logprobs = Logprobs(tokenizer) if converted.asked.logprobs is not None else None
        self._as_it_is = self._logprobs is None and index == 0
        name = converted.served.name
        self._response = shape.response_type(response_id, name, int(time.time()), prompt_tokens, 0)
        self._held: list[Any] = []
        self._broken: str | None = None
        usage = deepseek_recipe.PromptUsage(prompt_tokens=prompt_tokens)
        self._emit(self._processor.push(_Chunk.ready(prompt_usage=usage)))

    def token(self, token: GeneratedToken) -> bool:
        if self._logged is not None:
            self._logged.append(token.token_id)
        try:
            if self._logprobs is not None and token.logprob is not None:
                self._logprobs.add(token.logprob, self._tokens.in_reasoning)
            text = self._tokens.push(token.token_id)
            if not text:
                return False
            chunks = self._processor.push(_Chunk.text(text, 1))
            if self._processor.finished:  # a stop string; the events have the usage, which is not known yet
                self._held = chunks
                return True
            self._emit(chunks)
        except Exception as error:  # must not reach the engine: it would end everyone's answers
            _LOG.exception("request %s: the answer cannot be parsed", self._request_id)
            self._broken = f"the answer cannot be parsed: {type(error).__name__}"
            return True
        return False

    def done(self, ended: Ended) -> None:
        usage = Usage(ended.prompt_tokens, ended.cached_tokens, ended.completion_tokens, self._tokens.reasoning_tokens)
        if self._logged is not None:
            text = self._tokenizer.decode(self._logged, keep_control=True)
            _LOG.info("answer of %s (%s): %r", self._request_id, ended.reason, text)
        data, body = b"", None
        try:
            if self._broken is None and _has_answer(ended):
                data, body = self._finish(ended, usage)
        except Exception as error:
            _LOG.exception("request %s: the answer cannot be ended", self._request_id)
            self._broken = f"the answer cannot be ended: {type(error).__name__}"
        if self._broken is not None:
            ended = dataclasses.replace(ended, reason="failed", message=self._broken)
        self._outbox.put(Done(self._index, self._request_id, ended, usage, data, body))

    def _finish(self, ended: Ended, usage: Usage) -> tuple[bytes, dict[str, Any] | None]:
        chunks = self._held
        if not self._processor.finished:
            if rest := self._tokens.rest():
                chunks += self._processor.push(_Chunk.text(rest))
        if not self._processor.finished:
            finish = _Finish.Stop if ended.reason == "stop" else _Finish.Length
            chunks += self._processor.push(_Chunk.finish(finish))
        if not self._processor.finished:
            chunks += self._processor.finish()
        if self._stream:
            return b"".join(self._event(chunk, usage) for chunk in chunks), None
        self._emit(chunks)
        body = json.loads(without_markers(self._response.to_json()))
        self._shape.complete(body, self._index, usage, self._logprobs)
        return b"", body

    def _emit(self, chunks: list[Any]) -> None:
        if not self._stream:
            for chunk in chunks:
                self._response.accumulate(chunk)
        elif chunks:
            self._outbox.put(Events(self._index, b"".join(self._event(chunk, None) for chunk in chunks)))

    def _event(self, chunk: Any, usage: Usage | None) -> bytes:
        name = self._shape.response_type.sse_event_name(chunk)
        text = without_markers(chunk.to_json())
        if usage is None and self._as_it_is:
            return server_sent(name, text)
        event = json.loads(text)
        self._shape.complete(event, self._index, usage, self._logprobs)
        return server_sent(name, to_json(event))


def _has_answer(ended: Ended) -> bool:
    return ended.reason in ("stop", "length") or (ended.reason == "deadline" and ended.completion_tokens > 0)
