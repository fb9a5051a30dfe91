"""Advantages against literal numbers and against their definition."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.rollout import gae

NUMBERS = st.floats(-1e3, 1e3)
RATES = st.floats(0.0, 1.0)


def discounted(x, gamma):
    """Discounted sums of all that follows, as they are defined."""
    return np.array([sum(gamma ** (k - t) * x[k] for k in range(t, len(x))) for t in range(len(x))])


def test_discounted_rewards_literal():
    adv = gae([1.0, 2.0, 4.0], [0.0, 0.0, 0.0], 0.0, 0.5, 1.0)
    np.testing.assert_array_equal(adv, np.float32([3.0, 4.0, 4.0]))


def test_gae_literal():
    # deltas: 1 + 0.5 * 2 - 4 = -2, 2 + 0.5 * 8 - 2 = 4, 4 + 0.5 * 16 - 8 = 4; then sums with factor 0.25
    adv = gae([1.0, 2.0, 4.0], [4.0, 2.0, 8.0], 16.0, 0.5, 0.5)
    np.testing.assert_array_equal(adv, np.float32([-0.75, 5.0, 4.0]))


def test_gae_of_a_terminated_end_takes_no_value_beyond_it():
    assert gae([1.0], [3.0], 0.0, 0.9, 0.9)[0] == np.float32(-2.0)


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int64])
def test_results_are_float32_and_inputs_unchanged(dtype):
    rew, val = np.array([1, 2, 3], dtype), np.array([0, 1, 0], dtype)
    result = gae(rew, val, 1.0, 0.9, 0.9)
    assert result.dtype == np.float32
    assert result.shape == (3,)
    np.testing.assert_array_equal(rew, [1, 2, 3])
    np.testing.assert_array_equal(val, [0, 1, 0])


def test_empty_trajectory():
    assert gae([], [], 1.0, 0.9, 0.9).shape == (0,)


@settings(deadline=None)
@given(st.lists(st.tuples(NUMBERS, NUMBERS), max_size=30), NUMBERS, RATES, RATES)
def test_gae_is_its_definition(steps, last_val, gamma, lam):
    rew, val = [r for r, _ in steps], [v for _, v in steps]
    after = val[1:] + [last_val]
    delta = [r + gamma * a - v for r, v, a in zip(rew, val, after)]
    np.testing.assert_allclose(
        gae(rew, val, last_val, gamma, lam), discounted(delta, gamma * lam), rtol=1e-6, atol=1e-2
    )


@settings(deadline=None)
@given(st.lists(st.tuples(NUMBERS, NUMBERS), min_size=1, max_size=30), NUMBERS, RATES)
def test_gae_at_lambda_1_is_return_minus_value(steps, last_val, gamma):
    rew, val = (np.array(column) for column in zip(*steps))
    np.testing.assert_allclose(
        gae(rew, val, last_val, gamma, 1.0), discounted([*rew, last_val], gamma)[:-1] - val, atol=1e-1
    )
