"""`generate`, `stream` and `complete`: text in, text out. They are methods of `Model`."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from dsv41_jax.arguments import check_text
from dsv41_jax.completion import Completion, GeneratedToken, TextRow
from dsv41_jax.sampling import SamplingOptions
from dsv41_jax.speculation import speculative_loop
from dsv41_jax.token_loop import (
    DEFAULT_PREFILL_MODE,
    Request,
    check_options,
    make_request,
    token_loop,
)
from dsv41_jax.tokenizer import Tokenizer

if TYPE_CHECKING:
    from dsv41_jax.generate import Model


def generate(
    self: "Model",
    prompts: str | Sequence[str],
    max_new_tokens: int = 128,
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
    n: int = 1,
    prefill_mode: str = DEFAULT_PREFILL_MODE,
    speculate: bool = False,
) -> str | list[str] | Completion | list[Completion] | list[list[str]] | list[list[Completion]]:
    """Continue text.

    Args:
        prompts: a string, or several (run as one batch; a row's tokens do not depend on its neighbours). Text never
            becomes a control token, whatever it spells.
        max_new_tokens: most tokens to write for each.
        temperature, top_k, top_p, min_p, repetition_penalty, presence_penalty, frequency_penalty, logit_bias, seed: see
            `sampling.SamplingOptions`.
        stop: strings that end a text.
        stop_ids: token ids that end a text besides the end-of-sequence token. What ends a text is not part of it.
        logprobs: report the log probability of every token, and of so many likeliest ones (0 to 20) beside it.
        n: how many texts to draw for each prompt, each from a stream of its own (the prompt is read n times).
        prefill_mode: "ced" runs only the encoder on all but the last tokens of a prompt, as the released model is
            served ("exact" where the model's layer map has no such split); "exact" runs all layers on all tokens.
        speculate: draft several tokens and verify them in one step. The distribution of the text is the same; a seed's
            text is another one.

    Returns:
        the new text (without the prompt): a string for a string, a list for a list. With n > 1 a list of n texts takes
        the place of each text, with logprobs a `Completion`. A character whose last bytes did not come before the end
        is left out.

    Raises:
        ValueError: bad options, an empty prompt, or a prompt that leaves no room. TypeError: no text, or an option of
            another kind.
    """
    sampling = SamplingOptions(
        temperature, top_k, top_p, min_p, repetition_penalty, presence_penalty, frequency_penalty, logit_bias, seed
    )
    found = complete(
        self,
        prompts,
        max_new_tokens=max_new_tokens,
        sampling=sampling,
        stop=stop,
        stop_ids=stop_ids,
        logprobs=logprobs,
        n=n,
        prefill_mode=prefill_mode,
        speculate=speculate,
    )
    if logprobs is None:
        found = [[completion.text for completion in samples] for samples in found]
    if n == 1:
        found = [samples[0] for samples in found]
    return found[0] if isinstance(prompts, str) else found


def stream(
    self: "Model",
    prompt: str,
    max_new_tokens: int = 128,
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
    prefill_mode: str = DEFAULT_PREFILL_MODE,
    speculate: bool = False,
) -> Iterator[str]:
    """As `generate` for one prompt, in pieces of whole characters as they come.

    Text that may begin a stop string is held back until that is certain. Options are checked at the call, before the
    first piece is asked for.
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
        prefill_mode=prefill_mode,
        speculate=speculate,
    )
    request = make_request(self.config, _encode(self.require_tokenizer(), [prompt]), options)
    return _pieces(self, request)


def complete(model: "Model", prompts: str | Sequence[str], **options) -> list[list[Completion]]:
    """For each prompt its n completions; options as `token_loop.check_options`."""
    checked = check_options(model.config, **options)
    if isinstance(prompts, bytes | Mapping) or not isinstance(prompts, Iterable):
        raise TypeError(f"prompts={prompts!r}: a string or a list of strings is needed")
    encoded = _encode(model.require_tokenizer(), [prompts] if isinstance(prompts, str) else list(prompts))
    return run(model, make_request(model.config, encoded, checked)) if encoded else []


def run(model: "Model", request: Request) -> list[list[Completion]]:
    """Run a request to its end: for each prompt its completions."""
    options = request.options
    rows = [TextRow(model.require_tokenizer(), options.stops) for _ in range(request.wanted)]
    ended: set[int] = set()
    for token in generated(model, request, ended):
        rows[token.row].push(token)
        if rows[token.row].ended:
            ended.add(token.row)
    for row in rows:
        row.flush()
    done = [row.completion(options.max_new_tokens, options.logprobs is not None) for row in rows]
    return [done[at : at + options.samples] for at in range(0, len(done), options.samples)]


def generated(model: "Model", request: Request, ended: set[int]) -> Iterator[GeneratedToken]:
    """The tokens of a request, from the loop that its options choose."""
    return (speculative_loop if request.options.speculate else token_loop)(model, request, ended)


def _pieces(model: "Model", request: Request) -> Iterator[str]:
    row = TextRow(model.require_tokenizer(), request.options.stops)
    ended: set[int] = set()
    for token in generated(model, request, ended):
        if piece := row.push(token):
            yield piece
        if row.ended:
            return
    if piece := row.flush():
        yield piece


def _encode(tokenizer: Tokenizer, prompts: Sequence[str]) -> list[list[int]]:
    for i, prompt in enumerate(prompts):
        check_text(f"prompt {i}", prompt)
    return [tokenizer.encode(prompt, add_bos=True) for prompt in prompts]
