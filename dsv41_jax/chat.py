"""`chat`: messages in, a message out, with reasoning and tool calls apart from the text. A method of `Model`."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dsv41_jax import text_calls
from dsv41_jax.chat_messages import read_dialogue
from dsv41_jax.chat_parse import AnswerParser, ChatDelta
from dsv41_jax.chat_prompt import ChatPrompt, encode, render
from dsv41_jax.completion import TokenLogprob
from dsv41_jax.sampling import SamplingOptions
from dsv41_jax.stop_strings import StopStrings
from dsv41_jax.token_loop import DEFAULT_PREFILL_MODE, Request, check_options, make_request

if TYPE_CHECKING:
    from dsv41_jax.generate import Model


@dataclasses.dataclass(frozen=True)
class ChatMessage:
    """An assistant's message.

    Attributes:
        content: the answer's text. reasoning: what was thought before it.
        tool_calls: [{"id", "type": "function", "function": {"name", "arguments": JSON text}}].
        finish_reason: "stop", "tool_calls" or "length" (max_new_tokens).
        usage: prompt_tokens (image spans in full), completion_tokens, reasoning_tokens, total_tokens.
        problems: departures of the answer from the release's format, in words; usually none.
        logprobs: of every token, where they were asked for.
    """

    content: str
    reasoning: str
    tool_calls: list[dict[str, Any]]
    finish_reason: str
    usage: dict[str, int]
    problems: tuple[str, ...] = ()
    logprobs: tuple[TokenLogprob, ...] | None = None

    @property
    def role(self) -> str:
        return "assistant"

    @property
    def reasoning_content(self) -> str:
        """OpenAI-style name of `reasoning`."""
        return self.reasoning

    def to_dict(self) -> dict[str, Any]:
        """The message as an entry of the next call's `messages`."""
        message = {"role": self.role, "content": self.content, "reasoning_content": self.reasoning}
        return message | ({"tool_calls": self.tool_calls} if self.tool_calls else {})


def chat(
    self: "Model",
    messages: Sequence[Mapping[str, Any] | ChatMessage],
    thinking: str | int | bool | None = "high",
    tools: Sequence[Mapping[str, Any]] | None = None,
    tool_choice: str | Mapping[str, Any] = "auto",
    stream: bool = False,
    max_new_tokens: int = 512,
    temperature: float = 1.0,
    *,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    repetition_penalty: float = 1.0,
    presence_penalty: float = 0.0,
    frequency_penalty: float = 0.0,
    logit_bias: Mapping[int, float] | None = None,
    seed: int = 0,
    stop: str | Sequence[str] = (),
    stop_ids: Sequence[int] = (),
    logprobs: int | None = None,
    prefill_mode: str = DEFAULT_PREFILL_MODE,
    speculate: bool = False,
) -> "ChatMessage | Iterator[ChatDelta]":
    """Answer a conversation.

    Args:
        messages: [{"role", "content"}] with the roles system, user, assistant, tool and latest_reminder. Content is
            text or a list of parts: {"type": "text", "text"}, {"type": "image_url", "image_url": {"url": data URL}} or
            {"type": "image", "image": bytes, Pillow image, uint8 array or data URL}. Assistants' messages can have
            reasoning_content and tool_calls; a last one with "prefix": True is continued. Earlier `ChatMessage`s can be
            among them. Text never becomes a control token, whatever it spells.
        thinking: "low", "high", "max" or an effort from 1 to 100; None, False or "none" answers without reasoning.
        tools: [{"type": "function", "function": {"name", "description", "parameters"}}].
        tool_choice: "auto" or "none"; without thinking also "required", or {"type": "function", "function": {"name"}}.
        stream: return an iterator of `ChatDelta`, whose last one has finish_reason and usage.
        stop: strings that end the answer; they are looked for in its content only.
        the others: as in `generate`.

    Returns:
        a `ChatMessage`.

    Raises:
        ValueError, TypeError: bad messages or options, a tokenizer without the markers of chat, images for a model
            without a vision tower; before anything heavy.
    """
    sampling = SamplingOptions(
        temperature, top_k, top_p, min_p, repetition_penalty, presence_penalty, frequency_penalty, logit_bias, seed
    )
    options = check_options(
        self.config,
        max_new_tokens=max_new_tokens,
        sampling=sampling,
        stop=stop,
        stop_ids=stop_ids,
        logprobs=logprobs,
        prefill_mode=prefill_mode,
        speculate=speculate,
    )
    plain = messages
    if isinstance(messages, Sequence):
        plain = [message.to_dict() if isinstance(message, ChatMessage) else message for message in messages]
    dialogue = read_dialogue(messages if isinstance(messages, str) else plain, thinking, tools, tool_choice)
    if dialogue.complete:
        raise ValueError("the last message is an assistant's: add a user's, or \"prefix\": True to continue it")
    prompt = render(dialogue)
    ids, images = encode(prompt, self.require_tokenizer(), self.config)
    request = make_request(self.config, [ids], options, [images] if images else None)
    answer = Answer(self, prompt, request)
    if stream:
        return answer.deltas()
    deltas = list(answer.deltas())
    return answer.message(deltas)


class Answer:
    """One answer while it is written."""

    def __init__(self, model: "Model", prompt: ChatPrompt, request: Request):
        self._model, self._request = model, request
        self._parser = AnswerParser(model.require_tokenizer(), prompt)
        self._stops = StopStrings(request.options.stops)
        self._logprobs: list[TokenLogprob | None] = []

    def deltas(self) -> Iterator[ChatDelta]:
        """Run the model; the last delta has finish_reason and usage."""
        tokens, called = 0, False
        for token in text_calls.generated(self._model, self._request, set()):
            tokens += 1
            self._logprobs.append(token.logprob)
            if delta := self._visible(self._parser.push([token.token_id])):
                called = called or bool(delta.tool_calls)
                yield delta
            if self._stops.found:
                break
        rest = self._visible(self._parser.finish())
        rest = dataclasses.replace(rest, content=rest.content + self._stops.flush())
        called = called or bool(rest.tool_calls)
        full = tokens == self._request.options.max_new_tokens and not self._stops.found
        prompt = int(self._request.lengths[0])
        usage = {
            "prompt_tokens": prompt,
            "completion_tokens": tokens,
            "reasoning_tokens": self._parser.reasoning_tokens,
            "total_tokens": prompt + tokens,
        }
        reason = "length" if full else "tool_calls" if called else "stop"
        yield dataclasses.replace(rest, finish_reason=reason, usage=usage)

    def message(self, deltas: Sequence[ChatDelta]) -> ChatMessage:
        """The sum of all deltas."""
        calls: dict[int, dict[str, Any]] = {}
        for piece in (piece for delta in deltas for piece in delta.tool_calls):
            function = piece["function"]
            new = {
                "id": piece.get("id"),
                "type": "function",
                "function": {"name": function.get("name"), "arguments": ""},
            }
            call = calls.setdefault(piece["index"], new)
            call["function"]["arguments"] += function.get("arguments", "")
        return ChatMessage(
            content="".join(delta.content for delta in deltas),
            reasoning="".join(delta.reasoning for delta in deltas),
            tool_calls=list(calls.values()),
            finish_reason=deltas[-1].finish_reason,
            usage=deltas[-1].usage,
            problems=tuple(self._parser.problems),
            logprobs=None if self._request.options.logprobs is None else tuple(self._logprobs),
        )

    def _visible(self, delta: ChatDelta) -> ChatDelta:
        """A delta without the text from a stop string on."""
        return dataclasses.replace(delta, content=self._stops.push(delta.content)) if delta.content else delta
