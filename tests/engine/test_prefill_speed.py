"""What the engine's own steps show of how fast it computes prompts."""

from __future__ import annotations

import pytest

from kvtier_core.engine.scheduler.prefill_speed import Computed, PrefillSpeed, pairs


def steps(speed, *took, begun=0.0, behind=0):
    """One after the other: steps of so many tokens of a prompt behind others, so many decoded, and so many seconds."""
    for prompt, decoded, seconds in took:
        speed.planned(Computed(prompt, pairs(behind, behind + prompt), decoded), begun)
        begun += seconds
        speed.ended(begun)


def rate(speed):
    return 1 / speed.seconds(0, 1, 1)


def test_the_speed_is_that_of_steps_that_compute_prompts():
    speed = PrefillSpeed()
    assert speed.seconds(0, 1, 1) is None
    steps(speed, (2048, 0, 0.5), begun=10.0)
    assert speed.seconds(0, 1024, 2048) == 0.25
    steps(speed, (8, 0, 1.0), begun=11.0)  # it takes as long for one token
    assert rate(speed) == pytest.approx(4096.0)


def test_decoding_says_nothing_of_the_speed_of_prompts():
    speed = PrefillSpeed()
    steps(speed, (2000, 0, 0.1), *[(0, 128, 0.025)] * 200)
    assert rate(speed) == pytest.approx(20_000)


@pytest.mark.parametrize("tokens", [64, 512, 4096])
def test_the_time_of_decoding_beside_a_prompt_is_not_the_prompts(tokens):
    """Whatever its share of the tokens: decoding 128 takes 25 ms with or without the prompt."""
    speed = PrefillSpeed()
    steps(speed, *[(0, 128, 0.025)] * 3, *[(tokens, 128, 0.025 + tokens / 20_000)] * 50)
    assert rate(speed) == pytest.approx(20_000)


def test_fewer_tokens_than_were_decoded_before_are_taken_to_need_as_much_less_time():
    speed = PrefillSpeed()
    steps(speed, (0, 128, 0.02), (1000, 32, 0.105))
    assert rate(speed) == pytest.approx(10_000)


def test_decoding_that_was_never_seen_alone_has_its_share_of_the_step():
    speed = PrefillSpeed()
    steps(speed, (300, 100, 0.4))
    assert rate(speed) == pytest.approx(1000)


def test_a_step_that_takes_no_longer_than_decoding_alone_says_nothing():
    speed = PrefillSpeed()
    steps(speed, (2000, 0, 0.1), (0, 128, 0.025), (64, 128, 0.024))
    assert rate(speed) == pytest.approx(20_000)


def test_time_in_which_the_engine_has_nothing_to_do_does_not_count():
    speed = PrefillSpeed()
    for begun in (0.0, 100.0):
        steps(speed, (1000, 0, 1.0), begun=begun)
    assert rate(speed) == pytest.approx(1000.0)


def test_a_step_that_is_planned_before_the_last_has_ended_begins_when_that_ends():
    speed = PrefillSpeed()
    for planned in (0.0, 0.1):
        speed.planned(Computed(1000, pairs(0, 1000), 0), planned)
    speed.ended(1.0)
    speed.ended(2.0)
    assert rate(speed) == pytest.approx(1000.0)


def test_a_new_speed_is_followed():
    speed = PrefillSpeed()
    steps(speed, (4096, 0, 1.0), *[(4096, 0, 4.0)] * 3)
    assert 1024.0 <= rate(speed) < 1150.0


def test_the_first_step_of_a_size_may_compile_something():
    speed = PrefillSpeed()
    steps(speed, (2048, 0, 30.0), (2048, 0, 0.5))
    assert rate(speed) == pytest.approx(4096)


def test_an_end_without_a_plan_is_ignored():
    speed = PrefillSpeed()
    speed.ended(1.0)
    assert speed.seconds(0, 1, 1) is None


# -- the costs of steps, tokens and pairs of tokens ----------------------------------------------------

A_STEP, A_TOKEN, A_PAIR = 0.02, 1e-4, 1e-8
SIZES = 2048, 500, 130, 70, 1500, 900


def takes(tokens, behind=0):
    return A_STEP + tokens * A_TOKEN + pairs(behind, behind + tokens) * A_PAIR


def seen(*sizes, behind=0):
    speed = PrefillSpeed()
    steps(speed, *((each, 0, takes(each, behind)) for each in sizes), behind=behind)
    return speed


@pytest.mark.parametrize("left", [70, 121])
@pytest.mark.parametrize("prompts", [1, 20])
def test_the_remainders_of_hits_do_not_make_prompts_dear(left, prompts):
    """Each step takes a time of its own, which no load saves."""
    speed = seen(*[2048, 300, 1000] * prompts, *[left] * 300)
    assert speed.seconds(0, 512, 2048) == pytest.approx(512 * A_TOKEN, rel=0.1)


def test_tokens_far_back_in_a_prompt_take_longer():
    speed = seen(*[20_000, 10_000, 5000, 1000, 100] * 50)
    for begin in (0, 4000, 19_000):
        computed = 1000 * A_TOKEN + pairs(begin, begin + 1000) * A_PAIR
        assert speed.seconds(begin, begin + 1000, 20_000) == pytest.approx(computed, rel=0.1)


def test_a_prompt_that_takes_several_steps_takes_fewer_after_a_load():
    speed = seen(*SIZES * 50)
    one, several = (speed.seconds(0, 1024, prompt) for prompt in (2000, 6000))
    assert several - one == pytest.approx(A_STEP / 2, rel=0.1)


def test_no_cost_is_negative():
    """Steps that take no longer for more tokens."""
    speed = PrefillSpeed()
    steps(speed, *[(100, 0, 0.2), (2000, 0, 0.1)] * 50)
    assert min(speed._costs) == 0.0 < max(speed._costs)
