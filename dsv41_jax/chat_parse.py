"""The tokens of an answer as reasoning, text and tool calls, while they come.

`deepseek-recipe` parses text in which control tokens are spelled out. So that nothing the model spells with ordinary
tokens can pass for one, control ids are handed to it as noncharacters of Unicode (U+FDD0 and on), which no text has:
they are replaced by U+FFFD in the model's text, and those that the parser leaves in its output are removed.
"""

import dataclasses
import json
from collections.abc import Iterable
from typing import Any

import deepseek_recipe

from dsv41_jax.chat_prompt import DSML, THINK_END, ChatPrompt
from dsv41_jax.tokenizer import StreamDecoder, Tokenizer

# The library's names of control tokens, each with a noncharacter for its spelling.
_NAMES = (
    "bos eos thinking_start thinking_end system user assistant latest_reminder dsml image "
    "ref ref_end box box_end point point_end polygon polygon_end"
).split()
_SPELLING = {name: chr(0xFDD0 + i) for i, name in enumerate(_NAMES)}
_MARKERS = {THINK_END: _SPELLING["thinking_end"], DSML: _SPELLING["dsml"]}
_REPLACED = {ord(char): "\ufffd" for char in _SPELLING.values()}
_REMOVED = {ord(char): None for char in _SPELLING.values()}


def parser_markers() -> deepseek_recipe.SpecialTokens:
    """The control tokens as `SpelledTokens` writes them: the parser's `ParsingOptions.special_tokens`."""
    return deepseek_recipe.SpecialTokens(**_SPELLING)


def without_markers(text: str) -> str:
    """The parser's output without the control tokens that it left there."""
    return text if text.isascii() else text.translate(_REMOVED)


@dataclasses.dataclass(frozen=True)
class ChatDelta:
    """What one step of an answer adds.

    Attributes:
        content, reasoning: text to append. tool_calls: pieces of calls in OpenAI's shape: {"index", "id", "type",
            "function": {"name", "arguments"}} at the beginning of a call, then {"index", "function": {"arguments"}}
            with more of its arguments.
        finish_reason, usage: in the last one only; see `chat.ChatMessage`.
    """

    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[dict[str, Any], ...] = ()
    finish_reason: str | None = None
    usage: dict[str, int] | None = None

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning or self.tool_calls or self.finish_reason)


class SpelledTokens:
    """The tokens of an answer as the text that the parser reads, control tokens as noncharacters.

    Attributes:
        in_reasoning: whether the reasoning has not ended. reasoning_tokens: tokens before its end.
        problems: departures from the release's format, in words.
    """

    def __init__(self, tokenizer: Tokenizer, in_reasoning: bool):
        self._tokenizer = tokenizer
        self._control = {tokenizer.token_id(name): name for name in (THINK_END, DSML)}
        self._decoder = StreamDecoder(tokenizer)
        self._marker = ""  # a DSML token whose next character has not come
        self.in_reasoning = in_reasoning
        self.reasoning_tokens = 0
        self.problems: list[str] = []

    def push(self, token_id: int) -> str:
        """The text that this token makes certain."""
        self.reasoning_tokens += self.in_reasoning
        name = self._control.get(token_id)
        if name == DSML:
            self._marker = _MARKERS[DSML]  # until the next character tells whether it is a tag
            return ""
        if name == THINK_END:
            if not self.in_reasoning:
                self.problem(f"{THINK_END} came outside of reasoning")
            self.in_reasoning = False
            return _MARKERS[THINK_END]
        if token_id in self._tokenizer.control_ids:
            self.problem(f"the control token {self._tokenizer.name(token_id)} came inside the answer")
        text = self._decoder.push(token_id)
        if not text.isascii():
            text = text.translate(_REPLACED)
        if not self._marker or not text:
            return text
        # The release's tags have a space after the marker; without one it is an older model's, and no call.
        marker, self._marker = self._marker, ""
        if not text.startswith(" "):
            self.problem(f"{DSML} without a space after it is no tag of this model")
            return text
        if self.in_reasoning:
            self.problem("tool calls came before the end of the reasoning")
            self.in_reasoning = False
        return marker + text

    def rest(self) -> str:
        """End of the answer: a marker that was held back. A character whose last bytes did not come is left out."""
        marker, self._marker = self._marker, ""
        return marker

    def problem(self, text: str) -> None:
        """Note a departure, once."""
        if text not in self.problems:
            self.problems.append(text)


class AnswerParser:
    """Incremental: tokens in, deltas out. How the tokens are cut into pushes makes no difference to the sum.

    Attributes:
        reasoning_tokens: tokens before the end of the reasoning.
        problems: departures from the release's format, in words; the parse makes the best of them.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: ChatPrompt):
        stages = deepseek_recipe.ThinkingInitialStage
        stage = None
        if prompt.thinking and prompt.stage == "reasoning":
            stage = stages.ReasoningContinuation if prompt.continues else stages.ReasoningStart
        elif prompt.continues:
            stage = stages.ContentContinuation
        options = deepseek_recipe.ParsingOptions(
            starts_in_tool_calls=prompt.stage == "calls",
            thinking_initial_stage=stage,
            special_tokens=parser_markers(),
        )
        conversation = deepseek_recipe.Conversation([deepseek_recipe.UserMessage("")], thinking_mode=prompt.thinking)
        request = deepseek_recipe.ConversationRequest(conversation, deepseek_recipe.ModelVersion.DeepseekV41Flash)
        generator = deepseek_recipe.ChatCompletionRequest.chunk_generator(request, "", "")
        self._stream = deepseek_recipe.StreamProcessor(generator, options)
        self._tokens = SpelledTokens(tokenizer, stage is not None and prompt.stage == "reasoning")
        self._arguments: dict[int, tuple[str, str]] = {}
        self._read(self._stream.push(deepseek_recipe.InferenceChunk.ready()))

    @property
    def reasoning_tokens(self) -> int:
        return self._tokens.reasoning_tokens

    @property
    def problems(self) -> list[str]:
        return self._tokens.problems

    def push(self, token_ids: Iterable[int]) -> ChatDelta:
        """What these tokens make certain."""
        text = "".join(map(self._tokens.push, token_ids))
        return self._read(self._stream.push(deepseek_recipe.InferenceChunk.text(text))) if text else ChatDelta()

    def finish(self) -> ChatDelta:
        """End of the answer: what was held back."""
        chunks = []
        if rest := self._tokens.rest():
            chunks += self._stream.push(deepseek_recipe.InferenceChunk.text(rest))
        chunks += self._stream.push(deepseek_recipe.InferenceChunk.finish(deepseek_recipe.InferenceFinishReason.Stop))
        if not self._stream.finished:
            chunks += self._stream.finish()
        delta = self._read(chunks)
        if self._tokens.in_reasoning:
            self._tokens.problem("the reasoning did not end")
        for name, arguments in self._arguments.values():
            for problem in _argument_problems(name, arguments):
                self._tokens.problem(problem)
        return delta

    def _read(self, chunks: list) -> ChatDelta:
        content, reasoning, calls = [], [], []
        for chunk in chunks:
            delta = json.loads(chunk.to_json())["choices"][0]["delta"]
            content.append(without_markers(delta.get("content") or ""))
            reasoning.append(without_markers(delta.get("reasoning_content") or ""))
            for call in delta.get("tool_calls") or ():
                function = call["function"]
                for part in function.keys() & {"name", "arguments"}:
                    function[part] = without_markers(function[part])
                name, arguments = self._arguments.get(call["index"], (function.get("name", ""), ""))
                self._arguments[call["index"]] = name, arguments + function.get("arguments", "")
                calls.append(call)
        return ChatDelta("".join(content), "".join(reasoning), tuple(calls))


def _argument_problems(name: str, arguments: str) -> list[str]:
    found = []

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        for key in {key for key, _ in items}:
            if sum(key == other for other, _ in items) > 1:
                found.append(f"the call of {name} has the parameter {key!r} twice")
        return dict(items)

    try:
        json.loads(arguments, object_pairs_hook=pairs)
    except json.JSONDecodeError as error:
        found.append(f"the arguments of the call of {name} are no JSON: {error}")
    return found
