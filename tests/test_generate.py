"""Text in, text out: a tiny model with random weights, `float32`. What it writes is noise, but the same noise."""

import numpy as np
import pytest

import dsv41_jax as ds
from dsv41_jax import token_loop
from dsv41_jax.generate import Model
from dsv41_jax.tokenizer import StreamDecoder
from fast_compile import use_fast_steps
from text_model import byte_tokenizer, write_text_model

PROMPT = "the café"
# One bucket: at most 16 tokens with BOS.
LIST = ["the café", "a", "an other 漢字"]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text") / "model"
    write_text_model(folder)
    with pytest.MonkeyPatch.context() as patch:
        use_fast_steps(patch)
        yield ds.load(folder, numerics="float32")


def greedy_ids(model, prompt, count):
    """The most likely tokens, one by one, from prefill and decode alone."""
    ids = np.array([model.tokenizer.encode(prompt, add_bos=True)], np.int32)
    logits, cache = model.prefill(ids)
    found = [int(np.argmax(logits[0]))]
    while len(found) < count:
        logits, cache = model.decode(cache, np.array(found[-1:]))
        found.append(int(np.argmax(logits[0])))
    return found


@pytest.fixture(scope="module")
def greedy(loaded):
    """12 greedy tokens after PROMPT, none of which ends the text."""
    ids = greedy_ids(loaded, PROMPT, 12)
    assert loaded.config.eos_token_id not in ids and len(set(ids)) > 3
    return ids


@pytest.fixture
def scripted(monkeypatch):
    """Makes the model write given tokens, [rows][steps], whatever it computes."""

    def script(rows):
        steps = iter(np.array(rows, np.int32).T)
        monkeypatch.setattr(token_loop, "sample", lambda *_: next(steps))

    return script


# --- what is generated -----------------------------------------------------------------------------------------------


def whole_characters(tokenizer, ids) -> str:
    decoder = StreamDecoder(tokenizer)
    return "".join(map(decoder.push, ids))  # and no flush: a character cut short at the end is left out


def test_greedy_text_is_what_prefill_and_decode_say(loaded, greedy):
    text = loaded.generate(PROMPT, max_new_tokens=12, temperature=0)
    assert isinstance(text, str) and text == whole_characters(loaded.tokenizer, greedy)
    assert loaded.generate(PROMPT, max_new_tokens=5, temperature=0) == whole_characters(loaded.tokenizer, greedy[:5])
    for cold in ({"top_k": 1}, {"top_p": 1e-6}):
        assert loaded.generate(PROMPT, max_new_tokens=12, seed=3, **cold) == text


def test_a_list_gives_a_list_and_rows_do_not_depend_on_neighbours(loaded):
    assert loaded.generate([]) == []
    together = loaded.generate(LIST, max_new_tokens=10, temperature=0)
    assert isinstance(together, list) and len(together) == len(LIST)
    alone = [loaded.generate(text, max_new_tokens=10, temperature=0) for text in LIST]
    assert together == alone and len(set(alone)) == len(LIST)
    assert loaded.generate(tuple(LIST[::-1]), max_new_tokens=10, temperature=0) == alone[::-1]
    assert loaded.generate([PROMPT], max_new_tokens=10, temperature=0) == alone[:1]


def test_seeds_reproduce(loaded):
    def run(seed, prompts=PROMPT):
        return loaded.generate(prompts, max_new_tokens=10, temperature=1.5, seed=seed)

    assert run(1) == run(1) != run(2)
    # Rows draw from streams of their own; the first row's is the one of a single prompt.
    first, second, third = run(1, [PROMPT] * 3)
    assert first == run(1) and len({first, second, third}) == 3
    default = loaded.generate(PROMPT, max_new_tokens=10)
    assert default == loaded.generate(PROMPT, max_new_tokens=10, temperature=1.0, seed=0)
    assert default != loaded.generate(PROMPT, max_new_tokens=10, temperature=0)


# --- where it ends ---------------------------------------------------------------------------------------------------


def test_stop_ids_end_a_row_and_are_not_shown(loaded, greedy):
    stop = greedy[6]
    wanted = greedy[: greedy.index(stop)]
    for stops in ([stop], (stop, 5), np.array([stop])):
        text = loaded.generate(PROMPT, max_new_tokens=12, temperature=0, stop_ids=stops)
        assert text == loaded.tokenizer.decode(wanted)


def test_end_of_sequence_ends_a_row_and_only_that_row(loaded, scripted, monkeypatch):
    encode = loaded.tokenizer.encode
    eos = loaded.config.eos_token_id
    a, b, c = (encode(text)[0] for text in "abc")
    script = [[a, eos, c, c, c], [b, b, b, eos, c], [eos, b, b, b, b], [c, c, eos, a, a]]
    steps = []
    decode = Model.decode
    monkeypatch.setattr(Model, "decode", lambda *args: steps.append(1) or decode(*args))
    scripted(script)
    assert loaded.generate(list("wxyz"), max_new_tokens=20) == ["a", "bbb", "", "cc"]
    assert len(steps) == 3  # nothing is computed once every row has ended
    scripted([[eos, a]])
    assert loaded.generate("x", max_new_tokens=20) == ""
    scripted([[a] * 4])
    assert loaded.generate("x", max_new_tokens=4) == "aaaa"
    assert len(steps) == 3 + 3  # the last token is not fed back


# --- pieces and characters -------------------------------------------------------------------------------------------


def test_pieces_joined_are_the_text(loaded):
    for options in ({"temperature": 0}, {"temperature": 1.5, "seed": 4}):
        pieces = list(loaded.stream(PROMPT, max_new_tokens=12, **options))
        assert all(pieces) and "".join(pieces) == loaded.generate(PROMPT, max_new_tokens=12, **options)


def test_characters_are_never_broken(loaded, scripted):
    text = "naïve café — 漢字 🌊!"
    ids = loaded.tokenizer.encode(text)
    assert len(ids) > len(text)  # characters of several tokens
    scripted([ids])
    pieces = list(loaded.stream("x", max_new_tokens=len(ids)))
    assert "".join(pieces) == text and not any("\ufffd" in piece for piece in pieces)
    assert len(pieces) > 10  # as they come
    scripted([ids[::-1], ids, ids, ids[::-1]])  # rows decode by themselves
    assert loaded.generate(list("wxyz"), max_new_tokens=len(ids))[1:3] == [text, text]
    # A text that ends inside a character leaves that character out.
    scripted([loaded.tokenizer.encode("a🌊")[:3]])
    assert loaded.generate("x", max_new_tokens=3) == "a"


def test_control_tokens_are_not_text(loaded, scripted):
    a = loaded.tokenizer.encode("a")[0]
    scripted([[a, loaded.tokenizer.token_id("<noise>"), 0, a]])
    assert loaded.generate("x", max_new_tokens=4) == "aa"
    ids = loaded.tokenizer.encode("<eos>")
    assert loaded.config.eos_token_id not in ids and loaded.tokenizer.decode(ids) == "<eos>"


# --- errors ----------------------------------------------------------------------------------------------------------

ERRORS = [
    ({"max_new_tokens": 0}, "max_new_tokens=0"),
    ({"max_new_tokens": 2.5}, "max_new_tokens=2.5"),
    ({"max_new_tokens": True}, "max_new_tokens=True"),
    ({"max_new_tokens": 1024}, "max_position_embeddings=1024"),
    ({"temperature": -1}, "temperature=-1"),
    ({"top_k": 0}, "top_k=0"),
    ({"top_p": 1.5}, "top_p=1.5"),
    ({"seed": -1}, "seed=-1"),
    ({"stop_ids": [10_000]}, "10000"),
    ({"stop_ids": ["a"]}, "whole numbers"),
    ({"prefill_mode": "fast"}, "'fast' is unknown.*exact"),
]


@pytest.mark.parametrize(("options", "message"), ERRORS)
def test_options_are_checked_before_anything_heavy(loaded, monkeypatch, options, message):
    def heavy(*_args, **_kwargs):
        raise AssertionError("the model ran")

    monkeypatch.setattr(Model, "prefill", heavy)
    for call in (loaded.generate, loaded.stream):  # `stream` at the call, before its first piece is asked for
        with pytest.raises(ValueError, match=message):
            call(PROMPT, **options)


def test_prompts_are_checked(loaded):
    for bad in ("", ["a", ""], ["a", 3], [None]):
        with pytest.raises(ValueError, match=r"prompt \d is .*: a non-empty string is needed"):
            loaded.generate(bad)
    with pytest.raises(ValueError, match="prompt of 1002 tokens and max_new_tokens=128 exceed"):
        loaded.generate("xy" * 500 + "z")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mode": "fast"}, "'fast' is unknown.*exact"),
        ({"lengths": [4, 0]}, r"lengths=\[4, 0\]: one number from 1 to 4"),
        ({"lengths": [4]}, r"lengths=\[4\]: .*each of 2 rows"),
        ({"max_len": 3}, "max_len=3: it must hold the prompt of 4 tokens"),
        ({"max_len": 1025}, "max_len=1025: .*max_position_embeddings=1024"),
        ({"token_ids": [[3, 100_000]]}, r"must lie in 0\.\..*100000"),
        ({"token_ids": [[3.0, 4.0]]}, "whole numbers"),
        ({"token_ids": [3, 4]}, "array of 2 axes"),
        ({"token_ids": np.zeros((2, 0), int)}, "whole numbers"),
    ],
)
def test_prefill_arguments_are_checked(loaded, arguments, message):
    with pytest.raises(ValueError, match=message):
        loaded.prefill(**{"token_ids": np.full((2, 4), 9)} | arguments)


# --- compilations ----------------------------------------------------------------------------------------------------


def test_a_second_call_in_a_bucket_compiles_nothing(loaded):
    loaded.generate(PROMPT, max_new_tokens=3, temperature=0)
    loaded.generate(LIST, max_new_tokens=3)
    before = ds.compilations()
    assert before > 0
    for prompt in ("a", "ab", "the the the", "15 bytes, 16 ids"[:15]):
        loaded.generate(prompt, max_new_tokens=7, temperature=0.3, top_k=4, top_p=0.9, seed=11, stop_ids=[9])
    loaded.generate(["a", "abc", "abcdefg"], max_new_tokens=2)  # three rows and four are one bucket
    loaded.generate(["a", "b", "c", "d"], max_new_tokens=9, temperature=0)
    assert ds.compilations() == before


def test_tokenizer_of_the_folder_is_used(loaded):
    assert len(loaded.tokenizer) == byte_tokenizer().get_vocab_size() == loaded.config.vocab_size
    assert loaded.tokenizer.encode("the", add_bos=True) == [0, loaded.tokenizer.token_id("the")]
