"""Fields of request bodies, by the same names in every API, and what is served."""

import dataclasses
import json
import math
import secrets
import time
from collections.abc import Mapping
from typing import Any, Protocol

from dsv41_jax.arguments import check_whole, is_real, is_whole
from dsv41_jax.chat_messages import IMAGE_PLACE
from dsv41_jax.config import ModelConfig
from dsv41_jax.sampling import TOP_LOGPROBS, SamplingOptions
from dsv41_jax.serving.api_errors import ApiError
from dsv41_jax.serving.image_sources import ImageSources
from dsv41_jax.serving.request import Constraint
from dsv41_jax.serving.settings import ServeSettings
from dsv41_jax.tokenizer import Tokenizer

_SEEDS = 1 << 32
_SAMPLING = (
    *("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"),
    *("logit_bias", "seed"),
)


class ConstraintFactory(Protocol):
    """Makes constraints; each raises `RequestError` for what no text can satisfy or no grammar can say."""

    def json_object(self, thinking: bool) -> Constraint: ...
    def json_schema(self, schema: Mapping[str, Any], thinking: bool) -> Constraint: ...
    def regex(self, pattern: str, thinking: bool) -> Constraint: ...
    def grammar(self, lark: str, thinking: bool) -> Constraint: ...
    def tool_calls(
        self, tools: list[dict[str, Any]], thinking: bool, only: str | None = None, *, several: bool = True
    ) -> Constraint: ...


@dataclasses.dataclass(frozen=True)
class Served:
    """What is served: `name` in the API, the model's config and tokenizer, and what may be asked of it."""

    name: str
    config: ModelConfig
    tokenizer: Tokenizer
    settings: ServeSettings
    constraints: ConstraintFactory
    images: ImageSources

    @property
    def max_len(self) -> int:
        """Most tokens of a request, prompt and answer together."""
        return min(self.settings.max_len, self.config.max_position_embeddings)


def read_json(data: bytes) -> dict[str, Any]:
    """The object in a body; ApiError 400 for anything else: other JSON, NaN, what is too deep, no UTF-8."""

    def refuse(name: str) -> None:
        raise ValueError(f"{name} is no JSON")

    try:
        body = json.loads(data.decode("utf-8"), parse_constant=refuse)
        text = json.dumps(body, ensure_ascii=False, allow_nan=False)  # 1e999 is read as infinity
    except UnicodeDecodeError:
        raise ApiError(400, "the body is no UTF-8") from None
    except RecursionError:
        raise ApiError(400, "the body is nested too deeply") from None
    except ValueError as error:
        raise ApiError(400, f"the body cannot be read as JSON: {error}") from None
    if not isinstance(body, dict):
        raise ApiError(400, f"the body is a JSON {type(body).__name__}: an object is needed")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise ApiError(400, "the body holds a lone surrogate: UTF-8 has no such character") from None
    if IMAGE_PLACE in text:
        raise ApiError(400, "the body holds the noncharacters U+FDD0 around 'image', which mark an image's place here")
    return body


def refuse_fields(body: Mapping[str, Any], fields: Mapping[str, str]) -> None:
    """ApiError 400 for a field that would change the answer, and that this server does not know."""
    for name, why in fields.items():
        if body.get(name):
            raise ApiError(400, f"{name}: {why}", "unsupported_parameter", name)


def read_several(parallel: object, name: str, tools: object, forced: bool, only: str | None) -> bool:
    """Whether an answer may have several calls. ApiError 400 where it may not, and no constraint sees to it."""
    if parallel is False and tools and not forced:
        text = f"{name}: this server cannot keep the model from several calls, but for a tool_choice that forces one"
        raise ApiError(400, text, "unsupported_parameter", name)
    return parallel is not False and only is None


def read_effort(value: object, name: str) -> tuple[Any, int | None]:
    """(the effort for the library, and the number itself where it is one)."""
    if is_whole(value):
        return "high", check_whole(name, value, 1, 100)
    return value, None


def with_system_role(messages: Any) -> Any:
    """Messages with a developer's as a system's; anything but a list of messages as it is."""
    if not isinstance(messages, list):
        return messages
    return [m | {"role": "system"} if isinstance(m, dict) and m.get("role") == "developer" else m for m in messages]


def check_model(served: Served, body: Mapping[str, Any]) -> None:
    """Whether the body names the model that is served: ApiError 400 without a name, 404 for another."""
    name = body.get("model")
    if not isinstance(name, str) or not name:
        raise ApiError(400, "model: the name of a model is needed", param="model")
    if name != served.name:
        raise ApiError(404, f"there is no model {name!r}: this server has {served.name!r}", "model_not_found", "model")


def read_sampling(served: Served, body: Mapping[str, Any]) -> SamplingOptions:
    """The options of sampling, by the same names in every API; ValueError or TypeError names what is wrong."""
    given = {name: value for name in _SAMPLING if (value := body.get(name)) is not None}
    if is_real(given.get("temperature")) and given["temperature"] > 2:
        raise ValueError(f"temperature={given['temperature']!r}: a number from 0 to 2 is needed")
    if is_whole(given.get("top_k")) and given["top_k"] in (0, -1):  # other servers' "all"
        del given["top_k"]
    if "logit_bias" in given:
        given["logit_bias"] = _logit_bias(given["logit_bias"])
    seed = given.get("seed")
    if seed is None:
        given["seed"] = secrets.randbelow(_SEEDS)
    else:
        given["seed"] = check_whole("seed", seed, -(1 << 63), (1 << 64) - 1) % _SEEDS
    sampling = SamplingOptions(**given)
    sampling.check_vocabulary(served.config.vocab_size)
    return sampling


def _logit_bias(value: object) -> dict[int, float]:
    if not isinstance(value, Mapping):
        raise TypeError(f"logit_bias={value!r}: an object of token ids and numbers is needed")
    for key in value:
        if not (key.isascii() and key.isdigit() and len(key) < 10):
            raise ValueError(f"logit_bias has the key {key!r}: a token id is needed")
    return {int(key): bias for key, bias in value.items()}


def read_logprobs(value: object, name: str = "top_logprobs") -> int:
    """How many likeliest tokens to report."""
    return check_whole(name, value, 0, TOP_LOGPROBS)


def read_batch_invariant(body: Mapping[str, Any], sampling: SamplingOptions) -> bool:
    """`batch_invariant`: whether the text may not depend on what else runs. By default where a client can tell: it
    gives a seed, or temperature 0.
    """
    value = body.get("batch_invariant")
    if value is None:
        return body.get("seed") is not None or sampling.temperature == 0
    if not isinstance(value, bool):
        raise TypeError(f"batch_invariant={value!r}: true or false is needed")
    return value


def read_priority(body: Mapping[str, Any]) -> int:
    """`priority`: smaller runs first."""
    value = body.get("priority")
    return 0 if value is None else check_whole("priority", value, -(1 << 31), (1 << 31) - 1)


def read_deadline(served: Served, body: Mapping[str, Any]) -> float:
    """`timeout` in seconds, at most the server's own, as a time of `time.monotonic`."""
    seconds, value = served.settings.request_seconds, body.get("timeout")
    if value is not None:
        if not is_real(value) or not 0 < value < math.inf:
            raise ValueError(f"timeout={value!r}: a number of seconds above 0 is needed")
        seconds = min(seconds, value)
    return time.monotonic() + seconds


def read_guide(body: Mapping[str, Any]) -> tuple[str, str] | None:
    """(method of the constraints, its argument) of `guided_regex` or `guided_grammar`, which are vLLM's names."""
    given = [name for name in ("guided_regex", "guided_grammar") if body.get(name) is not None]
    for name in given:
        if not isinstance(body[name], str):
            raise TypeError(f"{name}={body[name]!r}: a string is needed")
    if len(given) > 1:
        raise ValueError(f"{' and '.join(given)} cannot be asked for at once")
    return (given[0].removeprefix("guided_"), body[given[0]]) if given else None


def text_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """Ids of a text that is continued, as `Model.generate` reads it: after the beginning-of-sequence token, if any."""
    return tokenizer.encode(text, add_bos=tokenizer.bos_token_id is not None)


def answer_length(served: Served, prompt_tokens: int, max_tokens: int | None, strict: bool = True) -> int:
    """How many tokens an answer may have.

    Raises:
        ApiError: 400 for a prompt that leaves no room, or (`strict`) more asked for than this server ever gives.
    """
    limit = served.max_len
    if prompt_tokens >= limit:
        text = f"the prompt has {prompt_tokens} tokens, and this server takes {limit} of prompt and answer together"
        raise ApiError(400, text, "context_length_exceeded")
    if max_tokens is None:
        max_tokens = served.settings.default_max_tokens
    elif strict and max_tokens > limit:
        text = f"max_tokens={max_tokens}: this server takes {limit} tokens of prompt and answer together"
        raise ApiError(400, text, "context_length_exceeded", "max_tokens")
    return min(max_tokens, limit - prompt_tokens)
