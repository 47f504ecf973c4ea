"""From a body of a chat API to requests for the engine."""

import asyncio
import logging
import secrets
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from typing import Any, Protocol

import deepseek_recipe
import numpy as np

from dsv41_jax.serving.answers import AnswerShape, ChatSink, Done
from dsv41_jax.serving.api_errors import ApiError, of_exception
from dsv41_jax.serving.conversion import ChatShape, Converted, Prepared, convert, prepare
from dsv41_jax.serving.exchange import Job
from dsv41_jax.serving.options import Served, read_json
from dsv41_jax.serving.outbox import Outbox
from dsv41_jax.serving.request import GenerationRequest

_LOG = logging.getLogger(__name__)


class Shape(ChatShape, AnswerShape, Protocol):
    """All that a chat API is here."""

    id_prefix: str

    def response(self, dones: Sequence[Done], converted: Converted) -> dict[str, Any]:
        """The response of all choices."""

    def tail(self, dones: Sequence[Done], converted: Converted, response_id: str) -> bytes:
        """The last events of a stream."""

    def error_event(self, error: ApiError) -> bytes:
        """An error inside a stream."""


class ChatJobs:
    """Makes jobs of one chat API's bodies. Reading, decoding images and tokenising run in threads of `workers`."""

    def __init__(self, served: Served, shape: Shape, workers: Executor):
        self._served, self._shape, self._workers = served, shape, workers

    async def __call__(self, data: bytes, tenant: str, outbox: Outbox) -> Job:
        return self._job(await self._prepare(data), tenant, outbox)

    async def _prepare(self, body: dict[str, Any] | bytes) -> Prepared:
        """A body, checked and encoded."""

        def read() -> Converted:
            return convert(self._served, self._shape, read_json(body) if isinstance(body, bytes) else body)

        converted = await self._in_thread(read)
        images = [await self._served.images.fetch(source) for source in converted.prompt.images]
        return await self._in_thread(lambda: prepare(converted, images))

    async def encode(self, body: dict[str, Any]) -> np.ndarray:
        """The prompt of a body as ids int32 [T]; ApiError for what is wrong with it."""
        try:
            return (await self._prepare(body)).token_ids
        except (ValueError, TypeError, deepseek_recipe.ConversionError) as error:
            raise of_exception(error) from error

    async def _in_thread(self, work: Callable[[], Any]) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._workers, work)

    def _job(self, prepared: Prepared, tenant: str, outbox: Outbox) -> Job:
        converted, shape = prepared.converted, self._shape
        response_id = shape.id_prefix + secrets.token_hex(12)
        if self._served.settings.log_prompts:
            _LOG.info("prompt of %s: %r", response_id, converted.prompt.text)
        requests = []
        for index, constraint in enumerate(prepared.constraints):
            request_id = f"{response_id}-{index}"
            sink = ChatSink(shape, converted, len(prepared.token_ids), response_id, request_id, index, outbox)
            requests.append(
                GenerationRequest(
                    request_id=request_id,
                    token_ids=prepared.token_ids,
                    sampling=converted.sampling,
                    max_new_tokens=prepared.max_new_tokens,
                    stop_ids=frozenset({self._served.config.eos_token_id}),
                    sink=sink,
                    images=prepared.images,
                    stream=index << 16,
                    logprobs=converted.asked.logprobs,
                    constraint=constraint,
                    batch_invariant=converted.batch_invariant,
                    priority=converted.priority,
                    tenant=tenant,
                    deadline=converted.deadline,
                )
            )
        return Job(
            requests=requests,
            stream=converted.library_request.stream,
            tail=lambda dones: shape.tail(dones, converted, response_id),
            response=lambda dones: shape.response(dones, converted),
            error_event=shape.error_event,
        )
