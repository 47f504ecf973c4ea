"""A conversation as the ids of its prompt.

`deepseek-recipe` renders a string and says where its control tokens stand. Only those become control ids; everything
between is plain text, whatever it spells.
"""

import dataclasses
from collections.abc import Iterable
from typing import Literal

import deepseek_recipe
import numpy as np

from dsv41_jax.chat_messages import IMAGE_PLACE, Dialogue
from dsv41_jax.config import ModelConfig
from dsv41_jax.image_input import ImageInput, expand_placeholders
from dsv41_jax.image_plan import preprocess_image, vision_config
from dsv41_jax.tokenizer import Tokenizer

BOS, EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
SYSTEM, ASSISTANT, THINK, THINK_END = "<｜System｜>", "<｜Assistant｜>", "<think>", "</think>"
DSML, IMAGE = "｜DSML｜", "<｜deepseek_image｜>"
MARKERS = (SYSTEM, "<｜User｜>", ASSISTANT, THINK, THINK_END, DSML)

# Where the model's answer begins: in its reasoning, in the text after it, or inside a block of tool calls.
Stage = Literal["reasoning", "content", "calls"]


@dataclasses.dataclass(frozen=True)
class Piece:
    """A stretch of a prompt: plain text, or one control token by name."""

    text: str
    control: bool = False


@dataclasses.dataclass(frozen=True)
class ChatPrompt:
    """A rendered conversation.

    Attributes:
        pieces: the prompt in order. images: in the order of their placeholders; the library's image sources where the
            dialogue has no images of its own.
        stage: where the answer begins. continues: whether it goes on with an assistant's text.
    """

    pieces: tuple[Piece, ...]
    images: tuple
    thinking: bool
    stage: Stage
    continues: bool

    @property
    def text(self) -> str:
        """The prompt as one string, control tokens by name. For reading: tokenising it would let text make tokens."""
        return "".join(piece.text for piece in self.pieces)


def render(dialogue: Dialogue) -> ChatPrompt:
    """Render a checked conversation."""
    encoding = deepseek_recipe.DeepseekV41Encoding().with_special_tokens(
        deepseek_recipe.SpecialTokens(image=IMAGE_PLACE)
    )
    rendered = encoding.render_conversation(dialogue.conversation)
    pieces, at = [], 0
    for start, end in rendered.special_ranges:
        name = rendered.prompt[start:end]
        pieces += [Piece(rendered.prompt[at:start]), Piece(IMAGE if name == IMAGE_PLACE else name, control=True)]
        at = end
    pieces.append(Piece(rendered.prompt[at:]))
    pieces = [piece for piece in pieces if piece.text]
    if dialogue.effort is not None:
        pieces = _with_effort(pieces, dialogue.effort)
    if dialogue.complete:
        pieces = _without_header(pieces)
    if dialogue.task is not None:
        if dialogue.task != "action":
            pieces = _without_header(pieces)
        pieces.append(Piece(f"<｜{dialogue.task}｜>", control=True))
    last = next(piece.text for piece in reversed(pieces) if piece.control)
    return ChatPrompt(
        pieces=tuple(pieces),
        images=tuple(
            source if dialogue.images is None else dialogue.images[int(source.data)]
            for source in rendered.image_sources
        ),
        thinking=dialogue.thinking,
        stage={THINK: "reasoning", DSML: "calls"}.get(last, "content"),
        continues=dialogue.continues,
    )


def _with_effort(pieces: list[Piece], effort: int) -> list[Piece]:
    """The library knows three levels: write the number into the line that it writes for the middle one."""
    line = "Reasoning Effort: 75 "
    at = next(i for i, piece in enumerate(pieces) if not piece.control)
    if not pieces[at].text.startswith(line):
        raise RuntimeError("the renderer's prompt does not begin with the effort line")
    text = f"Reasoning Effort: {effort} " + pieces[at].text[len(line) :]
    return [*pieces[:at], Piece(text), *pieces[at + 1 :]]


def _without_header(pieces: list[Piece]) -> list[Piece]:
    """Without the assistant's header, which the library puts at the end of every prompt."""
    if pieces[-2].text != ASSISTANT or pieces[-1].text not in (THINK, THINK_END):
        raise RuntimeError("the renderer's prompt does not end with the assistant's header")
    return pieces[:-2]


def check_markers(tokenizer: Tokenizer, names: Iterable[str] = MARKERS) -> None:
    """ValueError naming the control tokens that a tokenizer lacks."""
    if missing := [name for name in names if not tokenizer.is_control(name)]:
        raise ValueError(f"this model's tokenizer lacks the control tokens of chat: {' '.join(missing)}")


def encode(prompt: ChatPrompt, tokenizer: Tokenizer, config: ModelConfig) -> tuple[np.ndarray, list[ImageInput]]:
    """A rendered conversation as ids int32 [T], image spans expanded, and its images.

    Raises:
        ValueError: a tokenizer without the markers, a model without a vision tower, or an image that cannot be read.
    """
    own = {BOS: config.bos_token_id, EOS: config.eos_token_id, IMAGE: config.image_token_id}
    used = (piece.text for piece in prompt.pieces if piece.control and piece.text not in own)
    check_markers(tokenizer, dict.fromkeys([*MARKERS, *used]))
    ids: list[int] = []
    for piece in prompt.pieces:
        if not piece.control:
            ids += tokenizer.encode(piece.text)
        elif piece.text in own:
            ids.append(own[piece.text])
        else:
            ids.append(tokenizer.token_id(piece.text))
    if prompt.images:
        vision_config(config)
    return expand_placeholders(ids, [preprocess_image(image, config)[:2] for image in prompt.images], config)
