import math
from itertools import pairwise

import pytest

from pretrain.schedules import cosine, linear_warmup, resolve_steps, warmup_cosine


def test_cosine_passes_through_its_closed_form():
    assert cosine(0, 100, 0.996, 1.0) == pytest.approx(0.996, abs=1e-15)
    assert cosine(50, 100, 0.996, 1.0) == pytest.approx(0.998, abs=1e-15)
    assert cosine(100, 100, 0.996, 1.0) == 1.0
    assert cosine(25, 100, 2.0, 0.0) == pytest.approx(1 + math.sqrt(0.5), abs=1e-15)
    assert cosine(500, 100, 0.996, 1.0) == 1.0  # stays there


def test_warmup_rises_on_a_line_and_hands_over_to_the_cosine_at_the_peak():
    rates = [warmup_cosine(step, 110, 1.0, 0.1, warmup=10) for step in range(110)]
    assert rates[:10] == pytest.approx([(step + 1) / 10 for step in range(10)])
    assert rates[10] == pytest.approx(1.0)
    assert rates[60] == pytest.approx(0.55)
    assert rates[-1] == pytest.approx(0.1, abs=1e-3)
    assert all(later < earlier for earlier, later in pairwise(rates[10:]))


def test_warmup_starts_where_it_is_told_to():
    assert warmup_cosine(0, 20, 1.0, warmup=4, start=0.2) == pytest.approx(0.4)
    assert warmup_cosine(0, 20, 1.0) == pytest.approx(1.0)
    assert warmup_cosine(1, 2, 1.0, warmup=2) == pytest.approx(1.0)  # a run that is all warm-up


def test_a_float_length_is_a_fraction_of_the_run():
    assert resolve_steps(0.25, 80) == 20
    assert resolve_steps(1.0, 80) == 80
    assert resolve_steps(1, 80) == 1
    assert warmup_cosine(7, 80, 1.0, warmup=0.1) == warmup_cosine(7, 80, 1.0, warmup=8) == pytest.approx(1.0)


def test_linear_warmup_of_the_teacher_temperature():
    values = [linear_warmup(step, 4, 0.04, 0.08) for step in range(6)]
    assert values == pytest.approx([0.04, 0.05, 0.06, 0.07, 0.08, 0.08])
    assert linear_warmup(0, 0, 0.04, 0.08) == 0.08


@pytest.mark.parametrize(
    ('length', 'message'),
    [
        (101, 'warm-up of 101 steps is longer than the run of 100'),
        (-1, '-1'),
        (1.5, 'fraction'),
        (-0.1, 'fraction'),
    ],
)
def test_impossible_lengths_are_one_clear_error(length, message):
    with pytest.raises(ValueError, match=message):
        warmup_cosine(0, 100, 1.0, warmup=length)
