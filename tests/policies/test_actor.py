"""The NumPy networks: parsing, first parameters, drawing actions. Agreement with the learners: test_learners.py."""

import json
import os
import sys
from dataclasses import asdict

import numpy as np
import pytest
from conftest import ROOT, run
from learning import draw, outputs, probs

from policies.actor import Actor, Spec, init_params, parse_hid_list

BOX = Spec(obs_dim=11, act_dim=3, discrete=False, policy_hid=(16, 8), valfunc_hid=(12,))
DISCRETE = Spec(obs_dim=4, act_dim=5, discrete=True, policy_hid=(16,), valfunc_hid=(8, 8, 8))
BOTH = pytest.mark.parametrize("spec", [BOX, DISCRETE], ids=["box", "discrete"])


def make_actor(spec, seed=0):
    """An actor whose outputs differ from row to row: the small last layer of a fresh policy would hide mistakes."""
    rng = np.random.default_rng(seed)
    params = init_params(spec, rng)
    for array in params.values():
        array[...] += rng.normal(0.0, 0.3, array.shape)
    return Actor(spec, params)


def make_obs(spec, n, seed=1):
    return np.random.default_rng(seed).standard_normal((n, spec.obs_dim), dtype=np.float32)


@pytest.mark.parametrize("text", ["64,32", "[64,32]", " [ 64, 32 ] ", "64 ,32"])
def test_hid_list_is_parsed(text):
    assert parse_hid_list(text, 376, 17, "policy") == (64, 32)


def test_hid_list_auto():
    assert parse_hid_list("auto", 376, 17, "policy") == (3760, 799, 170)
    assert parse_hid_list("auto", 376, 17, "value") == (3760, 137, 5)


@pytest.mark.parametrize("text", ["", "64,,64", "64,-1", "0", "[64", "6.4", "__import__('os')", "64 64", "²"])
def test_hid_list_refuses_what_is_no_list(text):
    with pytest.raises(ValueError, match="hidden layers") as error:
        parse_hid_list(text, 4, 2, "policy")
    assert "\n" not in str(error.value)


@BOTH
def test_spec_goes_through_json(spec):
    assert Spec.from_dict(json.loads(json.dumps(asdict(spec)))) == spec


@BOTH
def test_first_parameters(spec):
    params = init_params(spec, np.random.default_rng(3))
    again = init_params(spec, np.random.default_rng(3))
    assert {key: array.shape for key, array in params.items()} == spec.shapes("policy") | spec.shapes("value")
    for key, array in params.items():
        assert array.dtype == np.float32
        assert array.flags.c_contiguous
        np.testing.assert_array_equal(array, again[key])
    first = params["policy/0/weight"]
    small = first.T @ first if first.shape[0] > first.shape[1] else first @ first.T
    np.testing.assert_allclose(small, 2.0 * np.eye(len(small)), atol=1e-5)
    actor = Actor(spec, params)
    obs = make_obs(spec, 50)
    spread = probs(actor, obs) - 1.0 / spec.act_dim if spec.discrete else outputs(actor, obs)
    assert np.abs(spread).max() < 0.1
    assert actor.value(obs).std() > 0.1


@BOTH
def test_a_row_does_not_depend_on_other_rows(spec):
    actor = make_actor(spec)
    obs = make_obs(spec, 20)
    noise = actor.noise(np.random.default_rng(0), 20)
    forward = [draw(actor, row, z) for row, z in zip(obs, noise)]
    backward = [draw(actor, row, z) for row, z in zip(obs[::-1].copy(), noise[::-1].copy())][::-1]
    np.testing.assert_array_equal(forward, backward)
    modes = np.array([actor.mode(actor.output(row)) for row in obs])
    if spec.discrete:
        np.testing.assert_array_equal(modes, probs(actor, obs).argmax(axis=1))
    else:
        np.testing.assert_allclose(modes, outputs(actor, obs), atol=1e-5)
        std = np.exp(actor.params["policy/log_std"])
        np.testing.assert_allclose(forward, outputs(actor, obs) + std * noise, atol=1e-5)


@BOTH
def test_an_action_is_kept_by_later_calls(spec):
    actor = make_actor(spec)
    obs = make_obs(spec, 2)
    noise = actor.noise(np.random.default_rng(0), 2)
    for call in (lambda i: draw(actor, obs[i], noise[i]), lambda i: actor.mode(actor.output(obs[i]))):
        first = call(0)
        copy = np.copy(first)
        call(1)
        np.testing.assert_array_equal(first, copy)


def test_box_action_type():
    actor = make_actor(BOX)
    noise = actor.noise(np.random.default_rng(0), 6)
    assert noise.dtype == np.float32
    action = draw(actor, make_obs(BOX, 1)[0], noise[0])
    assert (action.dtype, action.shape) == (np.float32, (3,))


def test_discrete_actions_have_the_networks_frequencies():
    actor = make_actor(DISCRETE)
    obs = make_obs(DISCRETE, 1)
    draws = [draw(actor, obs[0], noise) for noise in (np.arange(10000) + 0.5) / 10000]
    assert all(type(draw) is int for draw in draws)
    frequencies = np.bincount(draws, minlength=5) / 10000
    np.testing.assert_allclose(frequencies, probs(actor, obs)[0], atol=2e-4)


@pytest.mark.parametrize("noise", [0.0, np.nextafter(1.0, 0.0), 1.0])
def test_discrete_action_stays_in_range_at_the_ends(noise):
    actor = make_actor(DISCRETE)
    assert draw(actor, make_obs(DISCRETE, 1)[0], noise) == (0 if noise == 0.0 else 4)


@BOTH
def test_actor_follows_parameters_that_are_overwritten_in_place(spec):
    actor, other = make_actor(spec, seed=0), make_actor(spec, seed=7)
    for key, array in actor.params.items():
        array[...] = other.params[key]
    actor.refresh()
    obs = make_obs(spec, 3)
    noise = actor.noise(np.random.default_rng(0), 3)
    for row, z in zip(obs, noise):
        np.testing.assert_array_equal(draw(actor, row, z), draw(other, row, z))
    np.testing.assert_array_equal(actor.value(obs), other.value(obs))
    act = np.array([draw(other, row, z) for row, z in zip(obs, noise)])
    np.testing.assert_array_equal(actor.logp(obs, act), other.logp(obs, act))


@BOTH
def test_values_depend_on_the_rows_alone(spec):
    actor = make_actor(spec)
    obs = make_obs(spec, 33)
    value = actor.value(obs)
    assert (value.dtype, value.shape) == (np.float32, (33,))
    np.testing.assert_array_equal(actor.value(obs.copy()), value)
    np.testing.assert_array_equal(actor.value(np.asfortranarray(obs)), value)
    padded = np.zeros((33, spec.obs_dim + 1), np.float32)
    padded[:, 1:] = obs
    np.testing.assert_array_equal(actor.value(padded[:, 1:]), value)


def test_gaussian_log_probability_literal():
    actor = make_actor(BOX)
    actor.params["policy/log_std"][...] = 0.0
    actor.refresh()
    obs = make_obs(BOX, 4)
    np.testing.assert_allclose(actor.logp(obs, outputs(actor, obs)), -1.5 * np.log(2 * np.pi), rtol=1e-6)
    np.testing.assert_allclose(actor.logp(obs, outputs(actor, obs) + 1), -1.5 * np.log(2 * np.pi) - 1.5, rtol=1e-6)


def test_categorical_log_probability():
    actor = make_actor(DISCRETE)
    obs = make_obs(DISCRETE, 6)
    expected = probs(actor, obs)
    np.testing.assert_allclose(np.exp([actor.logp(obs, np.full(6, i)) for i in range(5)]).sum(axis=0), 1.0, rtol=1e-6)
    act = np.array([0, 1, 2, 3, 4, 0])
    np.testing.assert_allclose(actor.logp(obs, act), np.log(expected[np.arange(6), act]), atol=1e-6)


ONE_ROW = """
import numpy as np
from policies.actor import HEIGHTS, Actor, Spec, init_params

widths, discrete = {widths}, {discrete}
rng = np.random.default_rng(0)
spec = Spec(widths[0], widths[-1], discrete, widths[1:-1], (8,))
actor = Actor(spec, init_params(spec, rng))
for array in actor.params.values():
    array[...] = rng.normal(0.0, 1.0 / np.sqrt(len(array)), array.shape)
assert actor.height in HEIGHTS
row, *others = rng.standard_normal((5 * actor.height, widths[0]), dtype=np.float32)
expected = actor.outputs([row])[0]
assert np.allclose(expected, actor.output(row), rtol=1e-3, atol=1e-4)
for n in (2, 3, *(k * actor.height + more for k in (1, 2) for more in (-1, 0, 1))):
    for place in {{0, 1, n // 2, n - 1}}:
        rows = list(rng.permutation(others)[:n])
        rows[place] = row.copy()
        found = actor.outputs(rows)
        assert len(found) == n and np.array_equal(found[place], expected), (n, place)
for other in (np.full_like(row, np.inf), np.full_like(row, np.nan), np.zeros_like(row)):
    assert np.array_equal(actor.outputs([other, row, other])[1], expected)
"""


@pytest.mark.parametrize("coretype", ["", "Haswell"])
@pytest.mark.parametrize(
    "widths, discrete",
    [((376, 1024, 1024, 17), False), ((376, 3760, 799, 170, 17), False), ((11, 1001, 1063, 3), True)],
    ids=str,
)
def test_a_row_of_a_product_depends_on_itself_alone(widths, discrete, coretype):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OPENBLAS_NUM_THREADS": "1"}
    environment |= {"OPENBLAS_CORETYPE": coretype} if coretype else {}
    program = ONE_ROW.format(widths=widths, discrete=discrete)
    done = run([sys.executable, "-c", program], 60, environment)
    assert done.status == 0, done.err


def test_the_size_of_the_policy_alone_decides_whether_it_is_wide():
    for policy_hid, valfunc_hid, wide in [((64, 64), (2000, 2000), False), ((1024, 1024), (8,), True)]:
        spec = Spec(376, 17, False, policy_hid, valfunc_hid)
        shapes = spec.shapes("policy") | spec.shapes("value")
        assert (Actor(spec, {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}).height > 0) is wide
