"""A request's body to what the engine takes, the same way for all three chat APIs.

`deepseek-recipe` reads the body in its API's shape and gives a conversation; `chat_prompt` renders and encodes it. What
the library does not know, or decides for itself, is read here beside it: efforts by number, the role developer, forced
tools while thinking, and the options of sampling, where what a client asks for is honoured.
"""

import dataclasses
import json
import math
import secrets
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import deepseek_recipe
import numpy as np

from dsv41_jax.arguments import check_whole, is_real, is_whole
from dsv41_jax.chat_messages import IMAGE_PLACE, Dialogue
from dsv41_jax.chat_prompt import ChatPrompt, encode, render
from dsv41_jax.config import ModelConfig
from dsv41_jax.image_input import ImageInput
from dsv41_jax.image_plan import vision_config
from dsv41_jax.sampling import TOP_LOGPROBS, SamplingOptions
from dsv41_jax.serving.api_errors import ApiError
from dsv41_jax.serving.image_sources import ImageSources
from dsv41_jax.serving.request import Constraint
from dsv41_jax.serving.settings import ServeSettings
from dsv41_jax.tokenizer import Tokenizer

_SEEDS = 1 << 32
_CONTINUED = (
    deepseek_recipe.ThinkingInitialStage.ReasoningContinuation,
    deepseek_recipe.ThinkingInitialStage.ContentContinuation,
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


@dataclasses.dataclass(frozen=True)
class Asked:
    """What a chat API's body asks for, besides what the library reads.

    Attributes:
        body: for the library. max_tokens: of the answer, or None. logprobs: how many likeliest tokens, or None.
        forced: whether a tool must be called. only: that tool. several: whether there may be more than one call.
        effort: 1 to 100 where that is a number.
        strict_length: whether a max_tokens above the server's limit is an error, or lowered to it.
        include_usage: whether a stream ends with a chunk that has the usage.
    """

    body: dict[str, Any]
    max_tokens: int | None
    n: int = 1
    logprobs: int | None = None
    forced: bool = False
    only: str | None = None
    several: bool = True
    effort: int | None = None
    strict_length: bool = True
    include_usage: bool = False


class ChatShape(Protocol):
    """What conversion needs of a chat API."""

    def ask(self, body: dict[str, Any]) -> Asked:
        """Read a body; ApiError, ValueError or TypeError for one that cannot be served."""

    def read(self, asked: Asked, options: deepseek_recipe.ConversionOptions) -> tuple[Any, Any]:
        """The library's reading of `asked.body`, and what its maker of chunks needs besides it.

        Raises:
            ValueError, ConversionError: the client's faults.
        """


@dataclasses.dataclass(frozen=True)
class Converted:
    """A body that was read: all but its images is checked. `extra` is the shape's own."""

    served: Served
    asked: Asked
    library_request: Any
    extra: Any
    prompt: ChatPrompt
    sampling: SamplingOptions
    batch_invariant: bool
    priority: int
    deadline: float
    make_constraint: Callable[[], Constraint | None]


@dataclasses.dataclass(frozen=True)
class Prepared:
    """What n requests to the engine have in common.

    Attributes:
        converted: where it comes from. token_ids: int32 [T], image spans expanded. constraints: one a choice.
    """

    converted: Converted
    token_ids: np.ndarray
    images: tuple[ImageInput, ...]
    max_new_tokens: int
    constraints: tuple[Constraint | None, ...]


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


_SAMPLING = (
    *("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"),
    *("logit_bias", "seed"),
)


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


def convert(served: Served, shape: ChatShape, body: dict[str, Any]) -> Converted:
    """Read a body of a chat API, up to its images.

    Raises:
        ApiError, RequestError, ValueError, TypeError, ConversionError: the client's faults.
    """
    check_model(served, body)
    asked = shape.ask(body)
    sampling, guide = read_sampling(served, body), read_guide(body)
    options = (
        deepseek_recipe.ConversionOptions()
        .with_model_versions_by_name({served.name: deepseek_recipe.ModelVersion.DeepseekV41Flash})
        .with_special_tokens(deepseek_recipe.SpecialTokens(image=IMAGE_PLACE))
    )
    library_request, extra = shape.read(asked, options)
    conversation, parsing = library_request.conversation, library_request.parsing_options
    stage = parsing.thinking_initial_stage
    dialogue = Dialogue(
        conversation,
        images=None,
        thinking=conversation.thinking_mode,
        effort=asked.effort if conversation.thinking_mode else None,
        continues=stage in _CONTINUED,
        complete=False,
        task=None,
    )
    prompt = render(dialogue)
    served.images.check(list(prompt.images))
    if prompt.images:
        vision_config(served.config)  # its error says that the model takes no images
    thinking = stage is not None and stage.starts_in_reasoning()
    found = library_request.inference_options.output_constraint
    kind, value = (found.kind, found.schema) if found is not None else (None, "")
    if (kind in ("json", "regex")) + (guide is not None) + asked.forced > 1:
        raise ValueError("a response format, a guide and a forced tool call exclude each other")

    def make_constraint() -> Constraint | None:
        if asked.forced:
            if kind != "tool_call":
                raise ValueError("tool_choice: there are no tools to call")
            tools = json.loads(value)
            if asked.only is not None and asked.only not in [tool["function"]["name"] for tool in tools]:
                raise ValueError(f"tool_choice: there is no tool {asked.only!r}")
            return served.constraints.tool_calls(tools, thinking, asked.only, several=asked.several)
        if guide is not None:
            return getattr(served.constraints, guide[0])(guide[1], thinking)
        if kind == "regex":
            return served.constraints.regex(value, thinking)
        if kind == "json":
            schema = json.loads(value) if value else None
            if schema is None or schema is True:
                return served.constraints.json_object(thinking)
            return served.constraints.json_schema(schema, thinking)
        return None

    return Converted(
        served=served,
        asked=asked,
        library_request=library_request,
        extra=extra,
        prompt=prompt,
        sampling=sampling,
        batch_invariant=read_batch_invariant(body, sampling),
        priority=read_priority(body),
        deadline=read_deadline(served, body),
        make_constraint=make_constraint,
    )


def prepare(converted: Converted, images: list[bytes | str]) -> Prepared:
    """Decode images (bytes or data URLs, in the prompt's order) and encode the prompt. Raises as `convert`."""
    served, asked = converted.served, converted.asked
    decoded = (
        served.images.decode(source.path, image) for source, image in zip(converted.prompt.images, images, strict=True)
    )
    # One at a time: a decoded image can take a hundred times the memory of what the model gets.
    prompt = dataclasses.replace(converted.prompt, images=_Lazily(decoded, len(images)))
    token_ids, inputs = encode(prompt, served.tokenizer, served.config)
    length = answer_length(served, len(token_ids), asked.max_tokens, asked.strict_length)
    constraints = tuple(converted.make_constraint() for _ in range(asked.n))
    return Prepared(converted, token_ids, tuple(inputs), length, constraints)


class _Lazily:
    """Images that are decoded when it is their turn."""

    def __init__(self, images, count: int):
        self._images, self._count = images, count

    def __iter__(self):
        return iter(self._images)

    def __len__(self) -> int:
        return self._count
