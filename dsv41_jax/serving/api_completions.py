"""The legacy Completions API: plain text or token ids are continued, without any markup of chat."""

import asyncio
import dataclasses
import json
import logging
import secrets
import time
from collections.abc import Sequence
from concurrent.futures import Executor
from typing import Any

import numpy as np

from dsv41_jax.arguments import check_ids, check_whole
from dsv41_jax.completion import GeneratedToken, TextRow, TokenLogprob
from dsv41_jax.serving.answers import Done, Events, Usage, server_sent, to_json
from dsv41_jax.serving.api_chat import MOST_CHOICES, usage_of
from dsv41_jax.serving.api_errors import ApiError, of_ended, openai_error
from dsv41_jax.serving.exchange import Job
from dsv41_jax.serving.options import (
    Served,
    answer_length,
    check_model,
    read_batch_invariant,
    read_deadline,
    read_guide,
    read_json,
    read_logprobs,
    read_priority,
    read_sampling,
    refuse_fields,
    text_ids,
)
from dsv41_jax.serving.outbox import Outbox
from dsv41_jax.serving.request import Constraint, Ended, GenerationRequest
from dsv41_jax.serving.settings import ServeSettings
from dsv41_jax.stop_strings import check_stops
from dsv41_jax.tokenizer import Tokenizer

_LOG = logging.getLogger(__name__)
_MOST_STOPS = 16


@dataclasses.dataclass(frozen=True)
class _Head:
    """What all chunks of one response have in common."""

    response_id: str
    created: int
    model: str

    def chunk(self, choices: list[dict[str, Any]], usage: dict[str, Any] | None = None) -> dict[str, Any]:
        return {
            "id": self.response_id,
            "object": "text_completion",
            "created": self.created,
            "model": self.model,
            "choices": choices,
            "usage": usage,
        }


class _LegacyLogprobs:
    """Log probabilities in the Completions API's shape."""

    def __init__(self, tokenizer: Tokenizer, offset: int):
        self._tokenizer, self._offset = tokenizer, offset
        self._new: dict[str, list[Any]] = {}
        self.take()

    def add(self, logprob: TokenLogprob) -> None:
        text = self._text(logprob.token_id)
        self._new["tokens"].append(text)
        self._new["token_logprobs"].append(max(float(logprob.logprob), -9999.0))
        top = {self._text(token_id): max(float(value), -9999.0) for token_id, value in reversed(logprob.top)}
        self._new["top_logprobs"].append(dict(reversed(top.items())))
        self._new["text_offset"].append(self._offset)
        self._offset += len(text)

    def take(self) -> dict[str, list[Any]]:
        """Those since the last time."""
        new = self._new
        self._new = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        return new

    def _text(self, token_id: int) -> str:
        raw = self._tokenizer.token_bytes(token_id)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:  # as OpenAI writes tokens that are no text of their own
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


class TextSink:
    """One choice of a completion while it is written: a `request.Sink`."""

    def __init__(
        self, head: _Head, tokenizer: Tokenizer, stops: Sequence[str], request: dict[str, Any], outbox: Outbox
    ):
        self._head, self._outbox = head, outbox
        self._row = TextRow(tokenizer, stops)
        self._stream, self._index, self._request_id = request["stream"], request["index"], request["request_id"]
        self._logprobs = _LegacyLogprobs(tokenizer, len(request["echo"])) if request["logprobs"] else None
        self._pieces: list[str] = []
        self._logged: list[int] | None = [] if request["log"] else None
        self._tokenizer = tokenizer
        self._add(request["echo"])

    def token(self, token: GeneratedToken) -> bool:
        if self._logged is not None:
            self._logged.append(token.token_id)
        if self._logprobs is not None and token.logprob is not None:
            self._logprobs.add(token.logprob)
        self._add(self._row.push(token))
        return self._row.ended

    def done(self, ended: Ended) -> None:
        usage = Usage(ended.prompt_tokens, ended.cached_tokens, ended.completion_tokens, 0)
        done = Done(self._index, self._request_id, ended, usage)
        if self._logged is not None:
            text = self._tokenizer.decode(self._logged, keep_control=True)
            _LOG.info("answer of %s (%s): %r", self._request_id, ended.reason, text)
        if of_ended(ended) is None:
            rest = self._row.flush()
            reason = "stop" if ended.reason == "stop" else "length"
            if self._stream:
                done = dataclasses.replace(done, data=self._event(rest, reason))
            else:
                text = "".join([*self._pieces, rest])
                done = dataclasses.replace(done, body=self._choice(text, reason))
        self._outbox.put(done)

    def _add(self, piece: str) -> None:
        if not self._stream:
            self._pieces.append(piece)
        elif piece:
            self._outbox.put(Events(self._index, self._event(piece, None)))

    def _choice(self, text: str, reason: str | None) -> dict[str, Any]:
        logprobs = self._logprobs.take() if self._logprobs is not None else None
        return {"index": self._index, "text": text, "logprobs": logprobs, "finish_reason": reason}

    def _event(self, text: str, reason: str | None) -> bytes:
        return server_sent(None, to_json(self._head.chunk([self._choice(text, reason)])))


class CompletionJobs:
    """Makes jobs of the Completions API's bodies."""

    def __init__(self, served: Served, workers: Executor):
        self._served, self._workers = served, workers

    async def __call__(self, data: bytes, tenant: str, outbox: Outbox) -> Job:
        loop = asyncio.get_running_loop()
        asked = await loop.run_in_executor(self._workers, lambda: _read(self._served, read_json(data)))
        return asked.job(self._served, tenant, outbox)


@dataclasses.dataclass(frozen=True)
class _Asked:
    """A body that was read. `prompts`: (ids int32 [T], the text that is echoed)."""

    prompts: tuple[tuple[np.ndarray, str], ...]
    lengths: tuple[int, ...]
    constraints: tuple[Constraint | None, ...]
    n: int
    stops: tuple[str, ...]
    logprobs: int | None
    stream: bool
    include_usage: bool
    shared: dict[str, Any]

    def job(self, served: Served, tenant: str, outbox: Outbox) -> Job:
        head = _Head("cmpl-" + secrets.token_hex(12), int(time.time()), served.name)
        requests = []
        for index, constraint in enumerate(self.constraints):
            which, sample = divmod(index, self.n)
            token_ids, echo = self.prompts[which]
            request_id = f"{head.response_id}-{index}"
            facts = {"stream": self.stream, "index": index, "request_id": request_id, "echo": echo}
            facts |= {"logprobs": self.logprobs is not None, "log": served.settings.log_prompts}
            requests.append(
                GenerationRequest(
                    request_id=request_id,
                    token_ids=token_ids,
                    max_new_tokens=self.lengths[which],
                    stop_ids=frozenset({served.config.eos_token_id}),
                    sink=TextSink(head, served.tokenizer, self.stops, facts, outbox),
                    stream=which + (sample << 16),
                    logprobs=self.logprobs,
                    constraint=constraint,
                    tenant=tenant,
                    **self.shared,
                )
            )
        return Job(
            requests=requests,
            stream=self.stream,
            tail=lambda dones: self._tail(head, dones),
            response=lambda dones: head.chunk(
                [done.body for done in sorted(dones, key=lambda done: done.index)], self._usage(dones)
            ),
            error_event=lambda error: server_sent(None, json.dumps(openai_error(error))),
        )

    def _usage(self, dones: list[Done]) -> dict[str, Any]:
        """Each prompt counts once, whatever n."""
        groups = [[d for d in dones if d.index // self.n == which] for which in range(len(self.prompts))]
        usages = [usage_of(group) for group in groups]
        keys = ("prompt_tokens", "completion_tokens", "total_tokens")
        cached = sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages)
        return {key: sum(usage[key] for usage in usages) for key in keys} | {
            "prompt_tokens_details": {"cached_tokens": cached}
        }

    def _tail(self, head: _Head, dones: list[Done]) -> bytes:
        usage = server_sent(None, to_json(head.chunk([], self._usage(dones)))) if self.include_usage else b""
        return usage + server_sent(None, "[DONE]")


def _read(served: Served, body: dict[str, Any]) -> _Asked:
    check_model(served, body)
    refuse_fields(body, {"suffix": "this model only writes on", "best_of": "ask for n texts"})
    config = served.config
    n = check_whole("n", body["n"], 1, MOST_CHOICES) if body.get("n") is not None else 1
    stream, echo = _flag(body, "stream"), _flag(body, "echo")
    logprobs = None if body.get("logprobs") in (None, False) else read_logprobs(body["logprobs"], "logprobs")
    if echo and logprobs is not None:
        raise ApiError(
            400, "echo: there are no log probabilities of a prompt's tokens", "unsupported_parameter", "echo"
        )
    prompts = _prompts(body.get("prompt"))
    if len(prompts) * n > MOST_CHOICES:
        raise ValueError(f"{len(prompts)} prompts with n={n}: at most {MOST_CHOICES} texts can be asked for at once")
    encoded = []
    for prompt in prompts:
        if not len(prompt):
            raise ValueError("prompt: at least one token is needed")
        ids = text_ids(served.tokenizer, prompt) if isinstance(prompt, str) else prompt
        ids = check_ids(config, ids, 1, "prompt")
        if config.vision is not None and (ids == config.image_token_id).any():
            raise ValueError(f"prompt: token {config.image_token_id} stands for images, which this API does not take")
        shown = prompt if isinstance(prompt, str) else served.tokenizer.decode(ids, keep_control=True)
        encoded.append((ids, shown if echo else ""))
    max_tokens = body.get("max_tokens")
    if max_tokens is not None:
        check_whole("max_tokens", max_tokens, 1)
    stops = () if body.get("stop") is None else check_stops(body["stop"])
    if len(stops) > _MOST_STOPS:
        raise ValueError(f"stop has {len(stops)} strings: at most {_MOST_STOPS} are taken")
    guide = read_guide(body)

    def constraint() -> Constraint | None:
        return getattr(served.constraints, guide[0])(guide[1], False) if guide is not None else None

    options = body.get("stream_options")
    sampling = read_sampling(served, body)
    shared = {
        "sampling": sampling,
        "batch_invariant": read_batch_invariant(body, sampling),
        "priority": read_priority(body),
        "deadline": read_deadline(served, body),
    }
    _log_prompts(served.settings, encoded, served.tokenizer)
    return _Asked(
        prompts=tuple(encoded),
        lengths=tuple(answer_length(served, len(ids), max_tokens) for ids, _ in encoded),
        constraints=tuple(constraint() for _ in range(len(encoded) * n)),
        n=n,
        stops=stops,
        logprobs=logprobs,
        stream=stream,
        include_usage=isinstance(options, dict) and options.get("include_usage") is True,
        shared=shared,
    )


def _flag(body: dict[str, Any], name: str) -> bool:
    value = body.get(name)
    if value not in (None, True, False):
        raise TypeError(f"{name}={value!r}: true or false is needed")
    return bool(value)


def _prompts(prompt: Any) -> list[str | list[int]]:
    """One prompt or several: each text, or a list of token ids."""
    if isinstance(prompt, str):
        return [prompt]
    if not isinstance(prompt, list) or not prompt:
        raise TypeError("prompt: a string, a list of token ids, or a list of those is needed")
    if all(type(item) is int for item in prompt):
        return [prompt]
    for item in prompt:
        if not isinstance(item, str) and not (isinstance(item, list) and all(type(i) is int for i in item)):
            raise TypeError("prompt: a string, a list of token ids, or a list of those is needed")
    return prompt


def _log_prompts(settings: ServeSettings, encoded: list, tokenizer: Tokenizer) -> None:
    if settings.log_prompts:
        for ids, _ in encoded:
            _LOG.info("prompt of a completion: %r", tokenizer.decode(ids, keep_control=True))
