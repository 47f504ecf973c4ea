"""A request's body to what the engine takes, the same way for all three chat APIs.

`deepseek-recipe` reads the body in its API's shape and gives a conversation; `chat_prompt` renders and encodes it. What
the library does not know, or decides for itself, is read here beside it: efforts by number, the role developer, forced
tools while thinking, and the options of sampling, where what a client asks for is honoured.
"""

import dataclasses
import json
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import deepseek_recipe
import numpy as np

from dsv41_jax.chat_messages import IMAGE_PLACE, Dialogue
from dsv41_jax.chat_prompt import ChatPrompt, encode, render
from dsv41_jax.image_input import ImageInput
from dsv41_jax.image_plan import vision_config
from dsv41_jax.sampling import SamplingOptions
from dsv41_jax.serving.image_sources import place
from dsv41_jax.serving.options import (
    Served,
    answer_length,
    check_model,
    read_batch_invariant,
    read_deadline,
    read_guide,
    read_priority,
    read_sampling,
)
from dsv41_jax.serving.request import Constraint

_CONTINUED = (
    deepseek_recipe.ThinkingInitialStage.ReasoningContinuation,
    deepseek_recipe.ThinkingInitialStage.ContentContinuation,
)


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
    make_constraint = _constraint_maker(served, asked, library_request, guide, thinking)
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


def _constraint_maker(
    served: Served, asked: Asked, library_request: Any, guide: tuple[str, str] | None, thinking: bool
) -> Callable[[], Constraint | None]:
    """Makes the constraint of one choice. ValueError where several things are asked for at once, or no tool is there.

    Tools that may be called, strict or not, constrain nothing; and where there are tools a schema of the response is
    in the prompt only: the answer may be a call.
    """
    found = library_request.inference_options.output_constraint
    kind, value = (found.kind, found.schema) if found is not None else (None, "")
    if (kind in ("json", "regex")) + (guide is not None) + asked.forced > 1:
        raise ValueError("a response format, a guide and a forced tool call exclude each other")
    make = served.constraints
    if asked.forced:
        if kind != "tool_call":
            raise ValueError("tool_choice: there are no tools to call")
        tools = json.loads(value)
        if asked.only is not None and asked.only not in [tool["function"]["name"] for tool in tools]:
            raise ValueError(f"tool_choice: there is no tool {asked.only!r}")
        return lambda: make.tool_calls(tools, thinking, asked.only, several=asked.several)
    if guide is not None:
        return lambda: getattr(make, guide[0])(guide[1], thinking)
    if kind == "regex":
        return lambda: make.regex(value, thinking)
    if kind == "json" and not value:
        return lambda: make.json_object(thinking)
    if kind == "json":
        return lambda: make.json_schema(json.loads(value), thinking)
    return lambda: None


def prepare(converted: Converted, images: list[bytes | str]) -> Prepared:
    """Decode images (bytes or data URLs, in the prompt's order) and encode the prompt. Raises as `convert`."""
    served, asked = converted.served, converted.asked
    decoded = (
        served.images.decode(place(source), image)
        for source, image in zip(converted.prompt.images, images, strict=True)
    )
    # One at a time: a decoded image can take a hundred times the memory of what the model gets.
    prompt = dataclasses.replace(converted.prompt, images=_Lazily(decoded, len(images)))
    token_ids, inputs = encode(prompt, served.tokenizer, served.config)
    length = answer_length(served, len(token_ids), asked.max_tokens, asked.strict_length)
    constraints = tuple(converted.make_constraint() for _ in range(asked.n))
    return Prepared(converted, token_ids, tuple(inputs), length, constraints)


class _Lazily:
    """Images that are decoded when it is their turn."""

    def __init__(self, images: Iterator[Any], count: int):
        self._images, self._count = images, count

    def __iter__(self) -> Iterator[Any]:
        return self._images

    def __len__(self) -> int:
        return self._count
