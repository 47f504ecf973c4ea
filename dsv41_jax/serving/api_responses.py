"""The Responses API of OpenAI, without its state: every request brings its whole conversation."""

from collections.abc import Iterator, Sequence
from typing import Any

import deepseek_recipe

from dsv41_jax.arguments import check_whole
from dsv41_jax.serving.answers import Done, Logprobs, Usage, server_sent, to_json
from dsv41_jax.serving.api_errors import ApiError
from dsv41_jax.serving.conversion import Asked, Converted
from dsv41_jax.serving.options import read_effort, read_logprobs, read_several, refuse_fields

_STATELESS = "this server keeps no conversations: send all of it as input"
_REFUSED = {
    "previous_response_id": _STATELESS,
    "conversation": _STATELESS,
    "prompt": "this server has no prompt templates",
    "background": "this server answers on the connection only",
}
_LOGPROBS = "message.output_text.logprobs"


class ResponsesShape:
    """Responses: `/v1/responses`."""

    id_prefix = "resp_"
    response_type = deepseek_recipe.ResponsesResponse

    def ask(self, body: dict[str, Any]) -> Asked:
        refuse_fields(body, _REFUSED)
        library, effort = dict(body), None
        if isinstance(body.get("reasoning"), dict) and body["reasoning"].get("effort") is not None:
            level, effort = read_effort(body["reasoning"]["effort"], "reasoning.effort")
            library["reasoning"] = body["reasoning"] | {"effort": level}
        forced, only = _forced(body.get("tool_choice"))
        several = read_several(body.get("parallel_tool_calls"), "parallel_tool_calls", body.get("tools"), forced, only)
        length = body.get("max_output_tokens")
        include = body.get("include")
        logprobs = body.get("top_logprobs")
        if isinstance(include, list) and _LOGPROBS in include and logprobs is None:
            logprobs = 0
        return Asked(
            library,
            max_tokens=None if length is None else check_whole("max_output_tokens", length, 1),
            logprobs=None if logprobs is None else read_logprobs(logprobs),
            forced=forced,
            only=only,
            several=several,
            effort=effort,
        )

    def read(self, asked: Asked, options: deepseek_recipe.ConversionOptions) -> tuple[Any, Any]:
        echo = deepseek_recipe.ResponsesRequest(to_json(asked.body)).echo()
        body = asked.body | {"tool_choice": "auto"} if asked.forced else asked.body
        request = deepseek_recipe.ResponsesRequest(to_json(body))
        namespaces = request.namespace_tool_map(options)
        return request.convert(options), (echo, namespaces)

    def generator(self, converted: Converted, response_id: str) -> Any:
        make = deepseek_recipe.ResponsesRequest.chunk_generator
        echo, namespaces = converted.extra
        generator = make(converted.library_request, response_id, converted.served.name)
        return generator.with_echo(echo).with_namespace_tool_map(namespaces)

    def complete(self, event: dict[str, Any], index: int, usage: Usage | None, logprobs: Logprobs | None) -> None:
        response = event if event.get("object") == "response" else event.get("response")
        if usage is not None and response is not None:
            response["usage"] = {
                "input_tokens": usage.prompt,
                "input_tokens_details": {"cached_tokens": usage.cached},
                "output_tokens": usage.completion,
                "output_tokens_details": {"reasoning_tokens": usage.reasoning},
                "total_tokens": usage.prompt + usage.completion,
            }
        if logprobs is None:
            return
        if event.get("type") == "response.output_text.delta":
            event["logprobs"], _ = logprobs.take()
        elif event.get("type") == "response.output_text.done":
            event["logprobs"] = logprobs.content
        for part in _texts(event):
            part["logprobs"] = logprobs.content

    def response(self, dones: Sequence[Done], converted: Converted) -> dict[str, Any]:
        return dones[0].body

    def tail(self, dones: Sequence[Done], converted: Converted, response_id: str) -> bytes:
        return b""

    def error_event(self, error: ApiError) -> bytes:
        code = error.code or error.openai_type
        event = {"type": "error", "code": code, "message": error.message, "param": error.param, "sequence_number": 0}
        return server_sent("error", to_json(event))


def _texts(value: Any) -> Iterator[dict[str, Any]]:
    """The finished parts of text in an event or a response."""
    if isinstance(value, dict):
        if value.get("type") == "output_text" and value.get("text"):
            yield value
        for key in ("part", "item", "response", "output", "content"):
            yield from _texts(value.get(key))
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item)


def _forced(choice: Any) -> tuple[bool, str | None]:
    """(whether a tool must be called, which one)."""
    if choice == "required":
        return True, None
    if isinstance(choice, dict) and choice.get("type") == "function":
        if not isinstance(choice.get("name"), str) or not choice["name"]:
            raise ApiError(400, "tool_choice: the name of a function is needed", param="tool_choice")
        return True, choice["name"]
    return False, None
