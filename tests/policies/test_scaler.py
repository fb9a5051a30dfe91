"""The running observation scale against NumPy on all observations at once."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.scaler import CLIP, Scaler


def test_identity_before_the_first_update():
    obs = np.array([[1.5, -2.0]], np.float32)
    np.testing.assert_array_equal(Scaler(2).scale(obs), obs)


@settings(deadline=None)
@given(st.lists(st.integers(0, 20), min_size=1, max_size=6), st.floats(-1e6, 1e6), st.floats(0.01, 1e3))
def test_moments_do_not_depend_on_how_rows_are_dealt(sizes, mean, std):
    rng = np.random.default_rng(0)
    rows = rng.normal(mean, std, (sum(sizes) + 2, 3))
    scaler = Scaler(3)
    for part in np.split(rows, np.cumsum(sizes)):
        scaler.update(part)
    arrays = scaler.arrays
    assert arrays["scaler/count"][0] == len(rows)
    np.testing.assert_allclose(arrays["scaler/run_mean"], rows.mean(axis=0), rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(arrays["scaler/run_m2"] / len(rows), rows.var(axis=0), rtol=1e-6)


def test_variance_survives_a_mean_far_from_zero():
    rows = 1e9 + np.arange(8.0).reshape(-1, 1)
    scaler = Scaler(1)
    scaler.update(rows[:3])
    scaler.update(rows[3:])
    assert scaler.arrays["scaler/run_m2"][0] / 8 == pytest.approx(5.25, rel=1e-9)


def test_scaled_observations_are_standard():
    rows = np.random.default_rng(0).normal(3.0, 0.5, (5000, 2)).astype(np.float32)
    scaler = Scaler(2)
    scaler.update(rows)
    scaled = scaler.scale(rows)
    assert scaled.dtype == np.float32
    np.testing.assert_allclose(scaled.mean(axis=0), 0.0, atol=1e-3)
    np.testing.assert_allclose(scaled.std(axis=0), 1.0, atol=1e-3)


def test_a_constant_scales_to_zero_and_an_outlier_is_clipped():
    scaler = Scaler(2)
    scaler.update(np.array([[7.0, -1.0], [7.0, 1.0]]))
    np.testing.assert_array_equal(scaler.scale(np.array([7.0, 1e9])), np.float32([0.0, CLIP]))
    np.testing.assert_array_equal(scaler.scale(np.array([7.0, -1e9])), np.float32([0.0, -CLIP]))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_row_has_the_same_bits_alone_and_in_a_batch(dtype):
    rows = np.random.default_rng(0).normal(3.0, 0.5, (37, 19)).astype(dtype)
    scaler = Scaler(19)
    scaler.update(rows)
    batch = scaler.scale(rows)
    out = np.empty(19, np.float32)
    for row, expected in zip(rows, batch):
        assert scaler.scale(row, out=out) is out
        np.testing.assert_array_equal(out, expected)


def test_state_is_modified_in_place_so_a_broadcast_carries_it():
    rank0, other = Scaler(2), Scaler(2)
    before = dict(rank0.arrays)
    rank0.update(np.array([[1.0, 2.0], [3.0, 5.0]], np.float32))
    assert all(rank0.arrays[key] is array for key, array in before.items())
    for key, array in rank0.arrays.items():
        other.arrays[key][...] = array
    row = np.array([2.5, 2.5], np.float32)
    np.testing.assert_array_equal(other.scale(row), rank0.scale(row))
