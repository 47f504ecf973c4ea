"""Structured output: what a request's text must look like, as masks over the vocabulary, through `llguidance`.

`Constraints` is made once for a tokenizer. Its methods check and compile what a client asks for, in the client's
thread; what they return is walked by the engine, one token a step.
"""

import collections
import random
import re
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import llguidance
import numpy as np

from dsv41_jax.arguments import check_text
from dsv41_jax.chat_prompt import DSML, THINK_END
from dsv41_jax.serving.constraint_calls import calls_grammar, tools_by_name
from dsv41_jax.serving.constraint_schema import MAX_BYTES, check_schema, json_text
from dsv41_jax.serving.request import RequestError
from dsv41_jax.tokenizer import Tokenizer

# JSON on one line, as in the model's training: a space may follow a comma or a colon, and no other white space stands
# outside of strings. A model that is weak, or at a loss, could go on forever where any number of it may.
_JSON_OPTIONS = {"whitespace_flexible": False, "item_separator": ",\\x20?", "key_separator": ":\\x20?"}
# Text that only one continuation can follow comes in the tokenizer's usual tokens, which llguidance works out in the
# engine's thread: 3 microseconds a byte, and all of a run at once. So where a run may be long (the schema is, or has a
# pattern, which could be "a{1000000}") it is left to the model in which tokens it writes it.
_MOST_FIXED = 1 << 14
_FREE_TOKENS = '\n%llguidance {"no_forcing": true}\n'
# Bounds of compilation (up to about 0.1 s) and of a step (up to about 20 ms), after which llguidance gives up.
_LIMITS = llguidance.LLParserLimits(
    max_items_in_row=2000,
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=200_000,
    step_max_items=50_000,
    max_lexer_states=50_000,
    max_grammar_size=100_000,
    verbose_errors=False,
)
_MAX_GRAMMAR_BYTES = 4 * MAX_BYTES
_KEPT = 64  # compiled grammars


class Constraints:
    """Constraints on texts of one tokenizer. Every method can be called from any thread.

    Args:
        vocab_size: V, rows of the logits; ids without a token are never allowed.
        eos_token_id: allowed where a text may end, and alone where it must.

    Methods take `thinking`: whether the answer begins in its reasoning. Then anything may come until the control token
    </think>, and the constraint begins behind it. All raise `RequestError` for what is broken, unsupported, too large,
    or cannot be satisfied.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_id: int):
        if not 0 <= eos_token_id < vocab_size:
            raise ValueError(f"eos_token_id={eos_token_id}: an id below vocab_size={vocab_size} is needed")
        self._tokenizer = tokenizer
        vocabulary = _Vocabulary(tokenizer, vocab_size, eos_token_id)
        self._ll_tokenizer = llguidance.LLTokenizer(vocabulary)
        exists = np.array([bool(token) for token in vocabulary.tokens])
        exists[eos_token_id] = True
        self._exists = _packed(exists)
        self._lock, self._building = threading.Lock(), threading.Lock()
        self._compiled: collections.OrderedDict[str, llguidance.LLMatcher] = collections.OrderedDict()

    def json_object(self, thinking: bool) -> "GrammarConstraint":
        """A JSON object, whatever is in it."""
        return self.json_schema({"type": "object"}, thinking)

    def json_schema(self, schema: Any, thinking: bool) -> "GrammarConstraint":
        """A JSON value that follows a schema, on one line, with its properties in the schema's order."""
        grammar = self._json_grammar(check_schema(schema))
        return self._constraint(grammar, thinking, "the schema")

    def regex(self, pattern: str, thinking: bool) -> "GrammarConstraint":
        """A text that matches a regular expression as a whole (Rust's syntax; no look-around, no back-references)."""
        _check_grammar_text("the regular expression", pattern)
        lark = f"start: /{llguidance.regex_to_lark(pattern, '')}/{_FREE_TOKENS}"
        return self._constraint(lark, thinking, "the regular expression")

    def grammar(self, lark: str, thinking: bool) -> "GrammarConstraint":
        """A text of a grammar in llguidance's Lark. Control tokens are allowed where it names them: `<｜User｜>`.

        A dead end of the grammar that no sample reaches is found only when a text gets there: see `GrammarConstraint`.
        """
        _check_grammar_text("the grammar", lark)
        return self._constraint(lark + _FREE_TOKENS, thinking, "the grammar", samples=4)

    def tool_calls(
        self,
        tools: Sequence[Mapping[str, Any]],
        thinking: bool,
        only: str | None = None,
        opened: bool = False,
        several: bool = True,
    ) -> "GrammarConstraint":
        """One block of calls, then the end.

        Args:
            tools: in OpenAI's shape. only: the name of the one that must be called.
            opened: the prompt ends inside of the block already (`ChatPrompt.stage == "calls"`), behind its first line.
            several: whether there may be more than one call.
        """
        if thinking and opened:
            raise ValueError("opened=True: a prompt that ends in reasoning has no open block of calls")
        schemas = tools_by_name(tools, only)
        for name, schema in schemas.items():
            self._matcher(self._json_grammar(schema), f"the parameters of the tool {name!r}")
        lark = calls_grammar(schemas, self._control(DSML), opened, several, _JSON_OPTIONS)
        return self._constraint(_with_tokens(lark, json_text(schemas, "the list of tools")), thinking, "the tools")

    def _json_grammar(self, schema: dict[str, Any]) -> str:
        text = json_text(schema | {"x-guidance": _JSON_OPTIONS}, "the schema")
        return _with_tokens(f"start: %json {text}\n", text)

    def _control(self, name: str) -> int:
        if not self._tokenizer.is_control(name):
            raise RequestError(f"this model's tokenizer lacks the control token {name}")
        return self._tokenizer.token_id(name)

    def _constraint(self, lark: str, thinking: bool, what: str, samples: int = 0) -> "GrammarConstraint":
        after = self._control(THINK_END) if thinking else None
        compiled = self._matcher(lark, what, samples)
        with self._lock:
            matcher = compiled.deep_copy()
        return GrammarConstraint(matcher, self._exists, after)

    def _matcher(self, lark: str, what: str, samples: int = 0) -> llguidance.LLMatcher:
        """The compiled grammar, at its start: to be copied, not to be used."""
        if (found := self._kept(lark)) is not None:
            return found
        with self._building:  # one at a time, so that many clients with large schemas cannot take every core
            if (found := self._kept(lark)) is not None:
                return found
            compiled = self._compile(lark, what)
            for seed in range(samples):
                self._sample(compiled, what, seed)
            with self._lock:
                self._compiled[lark] = compiled
                while len(self._compiled) > _KEPT:
                    self._compiled.popitem(last=False)
            return compiled

    def _kept(self, lark: str) -> llguidance.LLMatcher | None:
        with self._lock:
            if lark in self._compiled:
                self._compiled.move_to_end(lark)
            return self._compiled.get(lark)

    def _compile(self, lark: str, what: str) -> llguidance.LLMatcher:
        if len(lark.encode()) > _MAX_GRAMMAR_BYTES:
            raise RequestError(f"{what}: a grammar of more than {_MAX_GRAMMAR_BYTES} bytes is not taken")
        matcher = llguidance.LLMatcher(self._ll_tokenizer, lark, log_level=0, limits=_LIMITS)
        if matcher.is_error():
            raise RequestError(f"{what} cannot be followed: {_message(matcher)}")
        # The first mask is where an empty language shows.
        try:
            GrammarConstraint(matcher.deep_copy(), self._exists).fill(np.empty_like(self._exists))
        except RuntimeError as error:
            raise RequestError(f"{what} cannot be followed: {error}") from None
        return matcher

    def _sample(self, compiled: llguidance.LLMatcher, what: str, seed: int) -> None:
        """Walk a random text for a while; RequestError where it gets stuck."""
        draw, mask = random.Random(seed), np.empty_like(self._exists)
        constraint = GrammarConstraint(compiled.deep_copy(), self._exists)
        try:
            for _ in range(32):
                constraint.fill(mask)
                allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
                token_id = int(draw.choice(allowed))
                if token_id == self._ll_tokenizer.eos_token:
                    return
                constraint.advance(token_id)
        except RuntimeError as error:
            raise RequestError(f"a sample of {what} did not get far: {error}") from None


class GrammarConstraint:
    """A request's place in its grammar; a `request.Constraint`. For one thread at a time.

    Raises:
        RuntimeError: by `fill`, where no text can go on (a dead end in a client's grammar), a step was too costly, or a
            token came that was not allowed. The request cannot go on then.
    """

    def __init__(self, matcher: llguidance.LLMatcher, exists: np.ndarray, after: int | None = None):
        """`exists`: the mask of ids that have a token. `after`: the control id behind which the constraint begins."""
        self._matcher, self._exists, self._after = matcher, exists, after

    def fill(self, mask: np.ndarray) -> bool:
        """As `request.Constraint`; `mask` must be contiguous."""
        if self._after is not None:
            return False
        if mask.dtype != np.int32 or mask.shape != self._exists.shape or not mask.flags.c_contiguous:
            raise ValueError(f"mask {mask.dtype}{list(mask.shape)}: int32{list(self._exists.shape)} is needed")
        self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        # An error leaves the end-of-sequence id alone in the mask, which would look like the end of a text.
        if self._matcher.is_error():
            raise RuntimeError(f"the constraint is stuck: {_message(self._matcher)}")
        mask &= self._exists
        return True

    def advance(self, token_id: int) -> None:
        """As `request.Constraint`."""
        if self._after is not None:
            if token_id == self._after:
                self._after = None
            return
        self._matcher.consume_token(int(token_id))  # what goes wrong is said by the next `fill`


class _Vocabulary:
    """A tokenizer as llguidance reads one: the exact bytes of every id, control tokens apart from text."""

    is_tokenizer_wrapper = True

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_id: int):
        self.eos_token_id, self.bos_token_id = eos_token_id, None
        # The byte FF marks control tokens there and is no part of any text, so a token that holds it is left out.
        tokens = (tokenizer.token_bytes(i) for i in range(vocab_size))
        self.tokens = [token if b"\xff" not in token else b"" for token in tokens]
        self.special_token_ids = sorted(i for i in tokenizer.control_ids | {eos_token_id} if i < vocab_size)
        self._tokenizer = tokenizer

    def __call__(self, text: str) -> list[int]:
        return self._tokenizer.encode(text)


def _with_tokens(lark: str, schema: str) -> str:
    """The grammar of a schema (JSON) with the choice of how its fixed text is cut into tokens."""
    return lark + _FREE_TOKENS if len(schema.encode()) > _MOST_FIXED or '"pattern' in schema else lark


def _packed(allowed: np.ndarray) -> np.ndarray:
    """bool [V] as bits, int32 [ceil(V / 32)]."""
    padded = np.zeros(-(-len(allowed) // 32) * 32, bool)
    padded[: len(allowed)] = allowed
    return np.packbits(padded, bitorder="little").view(np.int32)


def _check_grammar_text(what: str, text: Any) -> None:
    try:
        check_text(what, text)
    except (TypeError, ValueError) as error:
        raise RequestError(str(error)) from None
    if len(text.encode()) > MAX_BYTES:
        raise RequestError(f"{what} has {len(text.encode())} bytes: at most {MAX_BYTES} are taken")


def _message(matcher: llguidance.LLMatcher) -> str:
    """What llguidance says is wrong, in one line."""
    text = re.split(r"\n +\d+ \| ", matcher.get_error())[0]  # without its excerpt of the grammar, partly ours
    text = re.sub(r'^(at 1\(8\): )?invalid regex ".*" \(in regex\): ', "invalid regex: ", text, flags=re.DOTALL)
    text = re.sub(r"regex parse error:.*error: ", "", text, flags=re.DOTALL)
    text = text.removeprefix("at 1(8): failed to compile JSON schema: ")
    text = text.replace("NoExtensionBias\n<non-verbose/>", "no text can go on from here")
    text = " ".join(text.split())
    return text if len(text) <= 300 else f"{text[:297]}..."
