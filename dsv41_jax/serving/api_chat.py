"""The Chat Completions API of OpenAI, as DeepSeek extends it."""

import json
import time
from collections.abc import Sequence
from typing import Any

import deepseek_recipe

from dsv41_jax.arguments import check_whole
from dsv41_jax.serving.answers import Done, Logprobs, Usage, server_sent, to_json
from dsv41_jax.serving.api_errors import ApiError, openai_error
from dsv41_jax.serving.conversion import Asked, Converted
from dsv41_jax.serving.options import read_effort, read_logprobs, read_several, refuse_fields, with_system_role

MOST_CHOICES = 128
_REFUSED = {
    "audio": "this model writes text only",
    "functions": "use tools",
    "function_call": "use tool_choice",
    "web_search_options": "this server does not search the web",
}


class ChatShape:
    """Chat Completions: `/v1/chat/completions`."""

    id_prefix = "chatcmpl-"
    response_type = deepseek_recipe.ChatCompletionResponse

    def ask(self, body: dict[str, Any]) -> Asked:
        refuse_fields(body, _REFUSED)
        if body.get("modalities") not in (None, ["text"]):
            raise ApiError(400, "modalities: this model writes text only", "unsupported_parameter", "modalities")
        library = {key: value for key, value in body.items() if key not in ("n", "seed", "max_completion_tokens")}
        library["messages"] = with_system_role(body.get("messages"))
        if body.get("reasoning_effort") is None:
            library.pop("reasoning_effort", None)
            effort = None
        else:
            library["reasoning_effort"], effort = read_effort(body["reasoning_effort"], "reasoning_effort")
        forced, only = _forced(body.get("tool_choice"))
        several = read_several(body.get("parallel_tool_calls"), "parallel_tool_calls", body.get("tools"), forced, only)
        if forced:
            library["tool_choice"] = "auto"
        lengths = [body[key] for key in ("max_tokens", "max_completion_tokens") if body.get(key) is not None]
        lengths = [check_whole("max_tokens", length, 1) for length in lengths]
        library.pop("max_tokens", None)
        logprobs = None
        if body.get("logprobs") is True:
            logprobs = read_logprobs(body.get("top_logprobs") or 0)
        options = body.get("stream_options")
        return Asked(
            library,
            max_tokens=min(lengths, default=None),
            n=check_whole("n", body["n"], 1, MOST_CHOICES) if body.get("n") is not None else 1,
            logprobs=logprobs,
            forced=forced,
            only=only,
            several=several,
            effort=effort,
            include_usage=isinstance(options, dict) and options.get("include_usage") is True,
        )

    def read(self, asked: Asked, options: deepseek_recipe.ConversionOptions) -> tuple[Any, None]:
        return deepseek_recipe.ChatCompletionRequest(to_json(asked.body)).convert(options), None

    def generator(self, converted: Converted, response_id: str) -> Any:
        make = deepseek_recipe.ChatCompletionRequest.chunk_generator
        return make(converted.library_request, response_id, converted.served.name)

    def complete(self, event: dict[str, Any], index: int, usage: Usage | None, logprobs: Logprobs | None) -> None:
        choice = event["choices"][0]
        choice["index"] = index
        event["usage"] = None  # of all choices together, at the end
        if logprobs is not None:
            content, reasoning = logprobs.take()
            if content or reasoning or "message" in choice:
                choice["logprobs"] = {"content": content, "reasoning_content": reasoning, "refusal": None}

    def response(self, dones: Sequence[Done], converted: Converted) -> dict[str, Any]:
        bodies = [done.body for done in sorted(dones, key=lambda done: done.index)]
        choices = [choice for body in bodies for choice in body["choices"]]
        return bodies[0] | {"choices": choices, "usage": usage_of(dones)}

    def tail(self, dones: Sequence[Done], converted: Converted, response_id: str) -> bytes:
        """The usage, where it was asked for, and the end of the stream."""
        done = server_sent(None, self.response_type.sse_done_data())
        if not converted.asked.include_usage:
            return done
        chunk = {
            "id": response_id,
            "object": "chat.completion.chunk",
            "created": int(time.time()),
            "model": converted.served.name,
            "system_fingerprint": None,
            "choices": [],
            "usage": usage_of(dones),
        }
        return server_sent(None, to_json(chunk)) + done

    def error_event(self, error: ApiError) -> bytes:
        return server_sent(None, json.dumps(openai_error(error)))


def usage_of(dones: Sequence[Done]) -> dict[str, Any]:
    """The usage of all choices: the prompt counts once."""
    first = min(dones, key=lambda done: done.index).usage
    completion = sum(done.usage.completion for done in dones)
    return {
        "prompt_tokens": first.prompt,
        "completion_tokens": completion,
        "total_tokens": first.prompt + completion,
        "prompt_tokens_details": {"cached_tokens": first.cached},
        "completion_tokens_details": {"reasoning_tokens": sum(done.usage.reasoning for done in dones)},
        "prompt_cache_hit_tokens": first.cached,
        "prompt_cache_miss_tokens": first.prompt - first.cached,
    }


def _forced(choice: Any) -> tuple[bool, str | None]:
    """(whether a tool must be called, which one)."""
    if choice == "required":
        return True, None
    if isinstance(choice, dict) and choice.get("type", "function") == "function":
        function = choice.get("function")
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(name, str) or not name:
            raise ApiError(400, "tool_choice: the name of a function is needed", param="tool_choice")
        return True, name
    return False, None
