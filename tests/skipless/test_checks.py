"""Values of a config: what passes, and what the sentence says of what does not."""

import math

import numpy as np
import pytest

from skipless.checks import check_flag, check_number, check_pair, check_whole


@pytest.mark.parametrize('value', [0, 1, 0.5, np.float32(0.25), np.int64(1)])
def test_numbers_in_range_pass(value):
    check_number('rate', value, 0, 1)


@pytest.mark.parametrize('value', [-1, 1.5, math.nan, math.inf, '0.5', None, True, [0.5]])
def test_other_values_are_no_numbers_in_range(value):
    with pytest.raises(ValueError, match=r'rate=.*: expected a finite number in \[0, 1\]'):
        check_number('rate', value, 0, 1)


def test_an_open_end_is_not_in_the_range():
    with pytest.raises(ValueError, match='c=0: expected a finite number > 0'):
        check_number('c', 0, 0, above=True)
    check_number('c', 1e-9, 0, above=True)
    check_number('c', -5)


@pytest.mark.parametrize('value', [0, 1.0, 2.5, '3', True, None])
def test_what_is_no_whole_number(value):
    with pytest.raises(ValueError, match=r'count=.*: expected a whole number >= 1'):
        check_whole('count', value, 1)


@pytest.mark.parametrize('value', ['False', 'no', 0, None])
def test_text_is_no_flag(value):
    with pytest.raises(ValueError, match=r'skip=.*: expected True or False'):
        check_flag('skip', value)


def test_pairs():
    check_pair('betas', [0.9, 0.95], 0, 1)
    for value in (0.9, (0.9,), 'ab', (0.9, 2)):
        with pytest.raises(ValueError, match='betas='):
            check_pair('betas', value, 0, 1)
