"""Text in, text out: a tiny model with random weights, `float32`. What it writes is noise, but the same noise."""

import dataclasses

import jax
import numpy as np
import pytest

import dsv41_jax as ds
from dsv41_jax import text_calls, token_loop
from dsv41_jax.completion import GeneratedToken
from dsv41_jax.config import ModelConfig
from dsv41_jax.generate import Model
from dsv41_jax.tokenizer import StreamDecoder
from text_model import byte_tokenizer, write_text_model

PROMPT = "the café"
# One bucket: at most 16 tokens with BOS.
LIST = ["the café", "a", "an other 漢字"]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text") / "model"
    write_text_model(folder)
    return ds.load(folder, numerics="float32")


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
        monkeypatch.setattr(token_loop, "sample", lambda logits, settings, counts, step: (next(steps), counts))

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


def test_a_map_without_encoder_only_prefill_is_reported(loaded):
    assert not loaded.config.supports_ced
    with pytest.warns(UserWarning, match='"exact" is used'):
        text = loaded.generate(PROMPT, max_new_tokens=3, temperature=0)
    assert text == loaded.generate(PROMPT, max_new_tokens=3, temperature=0, prefill_mode="exact")


def test_a_list_gives_a_list_and_rows_do_not_depend_on_neighbours(loaded):
    assert loaded.generate([]) == []
    together = loaded.generate(LIST, max_new_tokens=10, temperature=0)
    assert isinstance(together, list) and len(together) == len(LIST)
    alone = [loaded.generate(text, max_new_tokens=10, temperature=0) for text in LIST]
    assert together == alone and len(set(alone)) == len(LIST)
    assert loaded.generate(iter(LIST), max_new_tokens=10, temperature=0) == alone
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


def test_several_texts_of_a_prompt(loaded):
    def run(prompts, n, **options):
        return loaded.generate(prompts, max_new_tokens=8, temperature=1.5, seed=2, n=n, **options)

    two = run(["a", PROMPT], 2)
    assert [len(texts) for texts in two] == [2, 2] and len({text for texts in two for text in texts}) == 4
    # The first text is that of n=1, and more prompts or texts change none.
    assert run("a", 1) == two[0][0] and run("a", 3)[:2] == two[0]
    assert [texts[0] for texts in two] == run(["a", PROMPT, "b"], 1)[:2]


def test_completions(loaded, greedy):
    options = {"max_new_tokens": 12, "temperature": 0}
    done = loaded.generate(PROMPT, logprobs=3, **options)
    assert isinstance(done, ds.Completion)
    assert done.text == loaded.generate(PROMPT, **options) and done.finish_reason == "length"
    assert list(done.token_ids) == greedy
    assert [p.token_id for p in done.logprobs] == greedy
    for p in done.logprobs:  # greedy: the chosen token is the likeliest
        assert len(p.top) == 3 and p.top[0] == (p.token_id, p.logprob) and p.logprob < 0
        assert [value for _, value in p.top] == sorted((value for _, value in p.top), reverse=True)
    # Of the model itself: temperature, bias and filters are not in it.
    forced = loaded.generate(PROMPT, max_new_tokens=1, logprobs=0, temperature=7, top_k=2, logit_bias={greedy[0]: 100})
    assert forced.token_ids == (greedy[0],) and forced.logprobs[0].top == ()
    assert forced.logprobs[0].logprob == pytest.approx(done.logprobs[0].logprob, abs=1e-6)
    stopped = loaded.generate([PROMPT], logprobs=0, stop_ids=[greedy[4]], **options)[0]
    assert stopped.finish_reason == "stop" and stopped.token_ids == tuple(greedy[: greedy.index(greedy[4])])
    assert [len(done) for done in loaded.generate(["a", PROMPT], logprobs=1, n=2, max_new_tokens=2)] == [2, 2]


def test_penalties_and_bias_reach_the_text(loaded, greedy):
    def run(**options):
        return loaded.generate(PROMPT, max_new_tokens=12, temperature=0, logprobs=0, **options).token_ids

    often = {greedy[0]: 8}
    assert set(run(logit_bias=often)) == {greedy[0]}
    for penalty in ({"frequency_penalty": 2}, {"frequency_penalty": 1, "presence_penalty": 2}):
        assert 2 <= run(logit_bias=often, **penalty).count(greedy[0]) < 12
    banned = dict.fromkeys(set(greedy), -100)
    assert not set(run(logit_bias=banned)) & set(greedy)
    prompt = loaded.tokenizer.encode(PROMPT, add_bos=True)
    assert not set(run(repetition_penalty=100)) & set(prompt)


# --- where it ends ---------------------------------------------------------------------------------------------------


def test_stop_ids_end_a_row_and_are_not_shown(loaded, greedy):
    stop = greedy[6]
    wanted = greedy[: greedy.index(stop)]
    for stops in ([stop], (stop, 5), np.array([stop])):
        text = loaded.generate(PROMPT, max_new_tokens=12, temperature=0, stop_ids=stops)
        assert text == loaded.tokenizer.decode(wanted)


def test_stop_strings_end_a_row(loaded, scripted):
    """Split over tokens and over the bytes of a character, in several rows, whole and streamed."""
    text = "one 🌊 two 🌊! END of it"
    ids = loaded.tokenizer.encode(text)
    for stop, wanted in (
        ("🌊!", "one 🌊 two "),
        (["it", " END"], "one 🌊 two 🌊!"),
        ("e", "on"),
        ("o", ""),
        ("END of it?", text),
        (["Q", "🌊? "], text),
    ):
        scripted([ids])
        assert loaded.generate("x", max_new_tokens=len(ids), stop=stop) == wanted
        scripted([ids])
        assert "".join(loaded.stream("x", max_new_tokens=len(ids), stop=stop)) == wanted
    # A row that ends does not end the others; what was drawn is in token_ids, and nothing more is drawn.
    scripted([ids, ids[::-1], ids, ids])
    first, second = loaded.generate(["x", "y", "z"], max_new_tokens=len(ids), stop="two", logprobs=0)[:2]
    assert first.text == "one 🌊 " and first.finish_reason == "stop"
    assert loaded.tokenizer.decode(first.token_ids) == "one 🌊 two" and second.token_ids == tuple(ids[::-1])
    scripted([ids])
    pieces = list(loaded.stream("x", max_new_tokens=len(ids), stop=["zzz"]))
    assert len(pieces) > 10 and "".join(pieces) == text


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
    ({"temperature": float("nan")}, "temperature=nan"),
    ({"top_k": 0}, "top_k=0"),
    ({"top_p": 1.5}, "top_p=1.5"),
    ({"min_p": float("inf")}, "min_p=inf"),
    ({"repetition_penalty": 0}, "repetition_penalty=0"),
    ({"presence_penalty": 3}, "presence_penalty=3"),
    ({"frequency_penalty": "x"}, "frequency_penalty='x'"),
    ({"logit_bias": {10_000: 1}}, "token id 10000"),
    ({"seed": -1}, "seed=-1"),
    ({"stop": ""}, r"stop\[0\] is ''"),
    ({"stop": 5}, "stop=5"),
    ({"stop_ids": [10_000]}, "stop_ids .*10000"),
    ({"stop_ids": ["a"]}, "stop_ids .*whole numbers"),
    ({"stop_ids": 5}, "stop_ids=5"),
    ({"prefill_mode": "fast"}, "'fast' is unknown.*exact"),
    ({"speculate": True}, "speculate=True: this model has no draft blocks"),
    ({"speculate": 1}, "speculate=1"),
]


@pytest.fixture
def nothing_heavy(monkeypatch):
    def heavy(*_args, **_kwargs):
        raise AssertionError("the model ran")

    monkeypatch.setattr(Model, "prefill", heavy)


@pytest.mark.parametrize(("options", "message"), ERRORS)
def test_options_are_checked_before_anything_heavy(loaded, nothing_heavy, options, message):
    for call in (loaded.generate, loaded.stream):  # `stream` at the call, before its first piece is asked for
        with pytest.raises((ValueError, TypeError), match=message):
            call(PROMPT, **options)
    if "1024" not in message:
        with pytest.raises((ValueError, TypeError), match=message):
            loaded.generate([], **options)  # nothing to do is no reason not to look


def test_options_of_whole_texts_are_checked(loaded, nothing_heavy):
    for options, message in (
        ({"n": 0}, "n=0"),
        ({"n": 1.0}, "n=1.0"),
        ({"logprobs": 21}, "logprobs=21: a whole number from 0 to 20"),
        ({"logprobs": True}, "logprobs=True"),
    ):
        with pytest.raises(ValueError, match=message):
            loaded.generate(PROMPT, **options)


def test_prompts_are_checked(loaded, nothing_heavy):
    for bad, message in (
        ("", "prompt 0 is ''"),
        (["a", ""], "prompt 1 is ''"),
        (["a", 3], "prompt 1 is 3"),
        ([None], "prompt 0 is None"),
        (None, "prompts=None"),
        (5, "prompts=5"),
        (b"bytes", "prompts=b'bytes'"),
        ({"a": "b"}, "prompts={'a': 'b'}"),
        (["a", "b\ud83d"], r"prompt 1 holds a lone surrogate '\\ud83d' at 1"),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            loaded.generate(bad)
    for call in (loaded.generate, loaded.stream):
        with pytest.raises(ValueError, match="prompt of 1002 tokens and max_new_tokens=128 exceed"):
            call("xy" * 500 + "z")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mode": "fast"}, "'fast' is unknown.*exact"),
        ({"lengths": [4, 0]}, r"lengths=\[4, 0\]: one number from 1 to 4"),
        ({"lengths": [4]}, r"lengths=\[4\]: .*each of 2 rows"),
        ({"lengths": [4, 2.5]}, "lengths must be whole numbers, got float64"),
        ({"lengths": [4, 2**32 + 2]}, "lengths must fit int32"),
        ({"lengths": [[4], [2, 3]]}, "lengths is not a rectangular array"),
        ({"max_len": 3}, "max_len=3: it must hold the prompt of 4 tokens"),
        ({"max_len": 1025}, "max_len=1025: .*max_position_embeddings=1024"),
        ({"max_len": 64.5}, "max_len=64.5"),
        ({"max_len": "64"}, "max_len='64'"),
        ({"token_ids": np.full((1, 1025), 9)}, "token_ids has rows of 1025 tokens, more than max_position_emb.*=1024$"),
        ({"token_ids": [[3, 100_000]]}, r"must lie in 0\.\..*100000"),
        ({"token_ids": [[3, -1]]}, r"must lie in 0\.\..*-1"),
        ({"token_ids": [[3.0, 4.0]]}, "whole numbers"),
        ({"token_ids": [[3.0, float("nan")]]}, "whole numbers"),
        ({"token_ids": [[3, 4], [3]]}, "token_ids is not a rectangular array"),
        ({"token_ids": None}, "whole numbers"),
        ({"token_ids": [3, 4]}, "array of 2 axes"),
        ({"token_ids": np.zeros((2, 0), int)}, "whole numbers"),
        ({"images": [None, []]}, r"images\[0\]=None"),
        ({"images": [[]]}, "images has 1 rows"),
        ({"images": 5}, "images=5"),
    ],
)
def test_prefill_arguments_are_checked(loaded, arguments, message):
    with pytest.raises((ValueError, TypeError), match=message):
        loaded.prefill(**{"token_ids": np.full((2, 4), 9)} | arguments)


def test_loss_arguments_are_checked(loaded):
    for arguments, message in (
        (([[3]],), "rows of 1 tokens: a loss needs at least 2"),
        ((np.full((1, 1025), 9),), "rows of 1025 tokens, more than max_position_embeddings=1024"),
        (([[3, 4]], [[0.5, 1.0]]), "segment_ids must be whole numbers"),
        (([[3, 4]], [[2**31, 1]]), "segment_ids must fit int32"),
        (([[3, 4]], [[1]]), r"segment_ids has shape \(1, 1\)"),
    ):
        with pytest.raises(ValueError, match=message):
            loaded.loss(*arguments)


def test_caches_and_drafts_are_checked(loaded, monkeypatch):
    logits, cache = loaded.prefill([loaded.tokenizer.encode("a", add_bos=True)])
    for other, message in (
        ({"numerics": "released"}, "numerics='released', this model has 'float32'"),
        ({"arrays": jax.tree.map(lambda a: a[:1], cache.arrays)}, "another model"),
    ):
        with pytest.raises(ValueError, match=message):
            loaded.decode(dataclasses.replace(cache, **other), np.array([5]))
    with pytest.raises(ValueError, match="token_ids has 2 rows, the cache 1"):
        loaded.decode(cache, np.array([5, 6]))
    with pytest.raises(TypeError, match="cache is ndarray"):
        loaded.decode(np.asarray(logits), np.array([5]))
    monkeypatch.setattr(ModelConfig, "n_draft", property(lambda config: 1))
    for options, message in (
        ({"token_ids": [5, 6]}, "token_ids has 2 rows, the cache 1"),
        ({"temperature": -1}, "temperature=-1"),
        ({"temperature": 0.5}, "temperature=0.5: .*needs a PRNG key"),
        ({"key": 5}, "key=5"),
        ({"cache": dataclasses.replace(cache, lengths=np.zeros(1, np.int32))}, "at least one token in each row"),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            loaded.draft(**{"cache": cache, "token_ids": [5]} | options)
    monkeypatch.undo()
    loaded.decode(cache, np.array([5]))
    with pytest.raises(RuntimeError, match="donated"):
        loaded.decode(cache, np.array([5]))


# --- speculation -----------------------------------------------------------------------------------------------------


def test_speculation_runs_its_own_loop(loaded, monkeypatch):
    seen = []

    def loop(model, request, ended):
        seen.append((model, request.options.speculate))
        yield from (GeneratedToken(0, i) for i in model.tokenizer.encode("abc"))

    monkeypatch.setattr(ModelConfig, "n_draft", property(lambda config: 1))
    monkeypatch.setattr(text_calls, "speculative_loop", loop)
    assert loaded.generate("x", speculate=True) == "abc" == "".join(loaded.stream("x", speculate=True))
    assert seen == [(loaded, True)] * 2


# --- compilations ----------------------------------------------------------------------------------------------------


def test_a_second_call_in_a_bucket_compiles_nothing(loaded):
    loaded.generate(PROMPT, max_new_tokens=3, temperature=0)
    loaded.generate(LIST, max_new_tokens=3)
    before = ds.compilations()
    assert before > 0
    for prompt in ("a", "ab", "the the the", "15 bytes, 16 ids"[:15]):
        loaded.generate(prompt, max_new_tokens=7, temperature=0.3, top_k=4, top_p=0.9, seed=11, stop_ids=[9])
        loaded.generate(
            prompt, max_new_tokens=2, min_p=0.1, presence_penalty=1, logit_bias={7: 2}, stop="q", logprobs=2
        )
    loaded.generate(["a", "abc", "abcdefg"], max_new_tokens=2)  # three rows and four are one bucket
    loaded.generate(["a", "b", "c", "d"], max_new_tokens=9, temperature=0)
    assert ds.compilations() == before


def test_tokenizer_of_the_folder_is_used(loaded):
    assert len(loaded.tokenizer) == byte_tokenizer().get_vocab_size() == loaded.config.vocab_size
    assert loaded.tokenizer.encode("the", add_bos=True) == [0, loaded.tokenizer.token_id("the")]
