"""The Messages API of Anthropic."""

from collections.abc import Sequence
from typing import Any

import deepseek_recipe

from dsv41_jax.arguments import check_whole
from dsv41_jax.serving.answers import Done, Logprobs, Usage, server_sent, to_json
from dsv41_jax.serving.api_errors import ApiError, anthropic_error
from dsv41_jax.serving.conversion import Asked, Converted
from dsv41_jax.serving.options import read_effort, read_several, refuse_fields, with_system_role

_REFUSED = {
    "mcp_servers": "this server calls no tools by itself",
    "container": "this server runs no code",
}


class MessagesShape:
    """Messages: `/v1/messages`."""

    id_prefix = "msg_"
    response_type = deepseek_recipe.MessagesResponse

    def ask(self, body: dict[str, Any]) -> Asked:
        refuse_fields(body, _REFUSED)
        library, effort = dict(body), None
        library["messages"] = with_system_role(body.get("messages"))
        config = body.get("output_config")
        if isinstance(config, dict) and config.get("effort") is not None:
            level, effort = read_effort(config["effort"], "output_config.effort")
            library["output_config"] = config | {"effort": level}
        forced, only, parallel = False, None, True
        choice = body.get("tool_choice")
        if isinstance(choice, dict):
            forced = choice.get("type") in ("any", "tool")
            if choice.get("type") == "tool":
                only = choice.get("name")
                if not isinstance(only, str) or not only:
                    raise ApiError(400, "tool_choice: the name of a tool is needed")
            if forced:
                library["tool_choice"] = {"type": "auto"}
            parallel = not choice.get("disable_parallel_tool_use")
        length = body.get("max_tokens")
        return Asked(
            library,
            max_tokens=None if length is None else check_whole("max_tokens", length, 1),
            forced=forced,
            only=only,
            several=read_several(parallel, "disable_parallel_tool_use", body.get("tools"), forced, only),
            effort=effort,
            strict_length=False,  # as the library does here: clients send their own model's limit
        )

    def read(self, asked: Asked, options: deepseek_recipe.ConversionOptions) -> tuple[Any, None]:
        return deepseek_recipe.MessagesRequest(to_json(asked.body)).convert(options), None

    def generator(self, converted: Converted, response_id: str) -> Any:
        make = deepseek_recipe.MessagesRequest.chunk_generator
        return make(converted.library_request, response_id, converted.served.name)

    def complete(self, event: dict[str, Any], index: int, usage: Usage | None, logprobs: Logprobs | None) -> None:
        if usage is not None and "usage" in event:
            event["usage"] |= {
                "input_tokens": usage.prompt - usage.cached,
                "cache_read_input_tokens": usage.cached,
                "output_tokens": usage.completion,
            }

    def response(self, dones: Sequence[Done], converted: Converted) -> dict[str, Any]:
        return dones[0].body

    def tail(self, dones: Sequence[Done], converted: Converted, response_id: str) -> bytes:
        return b""

    def error_event(self, error: ApiError) -> bytes:
        return server_sent("error", to_json(anthropic_error(error)))
