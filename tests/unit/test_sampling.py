"""Picking tokens, and ending an answer at a stop string."""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moonvit.engines import Sampling
from moonvit.engines.embedded.sampling import Defaults, Sampler, StopStrings, check_sampling, defaults_from_dict
from moonvit.errors import ConfigError, NonFiniteError, RequestError

GREEDY = Defaults()
LOGITS = torch.tensor([1.0, 3.0, 2.0, -1.0, 0.5])


def draw(count: int, logits: torch.Tensor = LOGITS, **settings: Any) -> list[int]:
    sampler = Sampler(Sampling(**settings), GREEDY)
    return [sampler.pick(logits) for _ in range(count)]


def test_greedy_takes_the_best_and_a_tiny_temperature_does_too() -> None:
    assert set(draw(20)) == {1}
    for temperature in (1e-3, 1e-40, 5e-324):
        assert set(draw(20, temperature=temperature, seed=1)) == {1}
    huge = torch.tensor([-3e38, 3e38, 0.0])
    assert set(draw(5, huge, temperature=1e-30, seed=1)) == {1}


def test_draws_follow_the_distribution() -> None:
    count = 20_000
    found = Counter(draw(count, temperature=0.8, seed=7))
    expected = (LOGITS.double() / 0.8).softmax(0)
    for id, share in enumerate(expected.tolist()):
        sigma = math.sqrt(count * share * (1 - share))
        assert abs(found[id] - count * share) < 4.5 * sigma


def test_nucleus_is_the_smallest_set_that_reaches_top_p() -> None:
    shares = LOGITS.softmax(0)  # 0.0838 0.6193 0.2278 0.0113 0.0508... in descending order 1, 2, 0, 4, 3
    order = shares.argsort(descending=True).tolist()
    for kept in range(1, 5):
        edge = float(shares[order[:kept]].sum())
        assert set(draw(2000, temperature=1.0, top_p=edge - 1e-4, seed=3)) == set(order[:kept])
    assert set(draw(4000, temperature=1.0, top_p=1.0, seed=3)) == set(order)
    assert set(draw(50, temperature=1.0, top_p=1e-12, seed=3)) == {1}


def test_a_seed_gives_the_same_tokens_and_leaves_the_global_state_alone() -> None:
    before = torch.get_rng_state()
    first = draw(200, temperature=1.5, seed=11)
    assert draw(200, temperature=1.5, seed=11) == first
    assert draw(200, temperature=1.5, seed=12) != first
    assert draw(200, temperature=1.5, seed=-5) == draw(200, temperature=1.5, seed=-5)
    assert draw(200, temperature=1.5) != draw(200, temperature=1.5)
    assert torch.equal(torch.get_rng_state(), before)


def test_streams_of_two_requests_do_not_mix() -> None:
    one, two = (Sampler(Sampling(temperature=1.5, seed=11), GREEDY) for _ in range(2))
    mixed: list[list[int]] = [[], []]
    for _ in range(100):
        mixed[0].append(one.pick(LOGITS))
        mixed[1].append(two.pick(LOGITS))
    assert mixed[0] == mixed[1] == draw(100, temperature=1.5, seed=11)


def test_banned_ids_are_never_picked() -> None:
    assert Sampler(Sampling(), GREEDY, banned=(1,)).pick(LOGITS) == 2
    sampler = Sampler(Sampling(temperature=2.0, seed=1), GREEDY, banned=(1, 2, 99))
    assert {sampler.pick(LOGITS) for _ in range(500)} == {0, 3, 4}


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nan_and_infinity_are_errors_and_not_token_zero(value: float, temperature: float) -> None:
    logits = LOGITS.clone()
    logits[3] = value
    with pytest.raises(NonFiniteError):
        draw(1, logits, temperature=temperature, seed=0)


@pytest.mark.parametrize(
    ("sampling", "param", "message"),
    [
        (Sampling(max_tokens=0), "max_tokens", "max_tokens = 0, must be at least 1"),
        (Sampling(temperature=-0.5), "temperature", "temperature = -0.5, must be 0 or more"),
        (Sampling(temperature=math.nan), "temperature", "temperature = nan"),
        (Sampling(temperature=math.inf), "temperature", "temperature = inf"),
        (Sampling(top_p=0.0), "top_p", "top_p = 0.0, must be above 0 and at most 1"),
        (Sampling(top_p=1.5), "top_p", "top_p = 1.5"),
        (Sampling(seed=2**64), "seed", f"seed = {2**64}, allowed"),
        (Sampling(stop=("a", "")), "stop", "empty string"),
        (Sampling(stop=tuple("abcdefghijklmnopq")), "stop", "17 strings, allowed 16"),
        (Sampling(stop=("a" * 1001,)), "stop", "a string of 1001 characters, allowed 1000"),
    ],
)
def test_settings_out_of_range_are_refused_by_name(sampling: Sampling, param: str, message: str) -> None:
    with pytest.raises(RequestError, match=re.escape(message)) as caught:
        check_sampling(sampling)
    assert caught.value.param == param


def test_ends_of_the_ranges_are_allowed() -> None:
    for sampling in (
        Sampling(max_tokens=1, temperature=0.0, top_p=1.0, seed=2**64 - 1, stop=("x",)),
        Sampling(seed=-(2**63)),
    ):
        check_sampling(sampling)
        Sampler(sampling, GREEDY)


def test_the_model_says_how_it_wants_to_be_sampled() -> None:
    assert defaults_from_dict({}) == Defaults(0.0, 1.0)
    assert defaults_from_dict({"temperature": 0.2, "top_p": 0.9}) == Defaults(0.0, 1.0)
    assert defaults_from_dict({"do_sample": True, "temperature": 0.2, "top_p": 0.95}) == Defaults(0.2, 0.95)
    assert defaults_from_dict({"do_sample": True}) == Defaults(1.0, 1.0)
    with pytest.raises(ConfigError, match=r"generation_config\.json: temperature = -1"):
        defaults_from_dict({"do_sample": True, "temperature": -1})
    with pytest.raises(ConfigError, match=r"generation_config\.json: top_p = '0\.9' is not a number"):
        defaults_from_dict({"do_sample": True, "top_p": "0.9"})
    sampler = Sampler(Sampling(top_p=0.5), Defaults(0.7, 0.9))
    assert (sampler.temperature, sampler.top_p) == (0.7, 0.5)
    assert Sampler(Sampling(temperature=0.0), Defaults(0.7, 0.9)).temperature == 0.0


# ---- stop strings ---------------------------------------------------------------------------------------------------


def stopped(pieces: list[str], stops: tuple[str, ...]) -> tuple[str, bool]:
    finder = StopStrings(stops)
    text = "".join(finder.feed(piece) for piece in pieces)
    return text + finder.flush(), finder.hit


@pytest.mark.parametrize(
    ("text", "stops", "expected"),
    [
        ("one two three", (" two",), "one"),
        ("one two three", ("four",), "one two three"),
        ("aaab", ("aab",), "a"),
        ("abcd", ("bcd", "c"), "ab"),  # "c" is complete before "bcd" is
        ("xabab", ("ab", "xab"), ""),  # complete together: the longer one
        ("the end", ("",), "the end"),
        ("ab", ("abc",), "ab"),
        ("", ("a",), ""),
    ],
)
def test_text_ends_before_the_first_stop_string(text: str, stops: tuple[str, ...], expected: str) -> None:
    stops = tuple(stop for stop in stops if stop)
    assert stopped([text], stops) == (expected, expected != text)
    assert stopped(list(text), stops) == (expected, expected != text)


@given(
    st.text("ab◁", max_size=12),
    st.lists(st.text("ab◁", min_size=1, max_size=4), max_size=3),
    st.lists(st.integers(0, 12), max_size=6),
)
def test_pieces_do_not_matter(text: str, stops: list[str], cuts: list[int]) -> None:
    places = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    pieces = [text[start:end] for start, end in itertools.pairwise(places)]
    whole = stopped([text], tuple(stops))
    assert stopped(pieces, tuple(stops)) == whole
    # The reference: look at every beginning of the text, shortest first.
    for end in range(len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            assert whole == (text[: end - max(map(len, found))], True)
            return
    assert whole == (text, False)


def test_what_cannot_become_a_stop_string_is_not_held_back() -> None:
    finder = StopStrings(("\n\nQ:",))
    assert finder.feed("answer") == "answer"
    assert finder.feed(" ends\n") == " ends"
    assert finder.feed("here") == "\nhere"
    assert finder.feed("\n\nQ") == ""
    assert finder.feed(": no") == ""
    assert finder.hit
    assert finder.feed("more") == ""
    assert finder.flush() == ""
