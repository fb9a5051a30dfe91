"""Learners that share a batch: together they do what one does on the whole of it, or fail together."""

import numpy as np
import pytest
from learning import ALGOS, BOTH, BOX, DISCRETE, Group, a_batch, assert_same_bits, split

from policies.data_parallel import Part
from policies.learner import shuffled

SPLITS = {"even": [0.5, 0.5], "uneven": [0.2, 0.7, 0.1], "one without rows": [0.6, 0.0, 0.4]}
MORE = {"ent_coef": 0.01}
TORCH_TOO = pytest.mark.parametrize("backend", ["numpy", "torch"])  # a group of TensorFlow's is long in compiling


def check_group(backend, spec, algo, weights, n_updates, **settings):
    """A group does what one learner does on the whole batch. Returns: the group and its states."""
    settings = {"algo": algo, "epochs": 3, "vf_epochs": 3, **settings}
    alone, group = Group(backend, spec, **settings), Group(backend, spec, len(weights), **settings)
    start = alone.state()[0][0]
    for seed in range(n_updates):
        batch = a_batch(spec, seed)
        (expected,) = alone.learn(batch)
        logs = group.learn(batch, split(weights, seed))
        assert all(log == logs[0] for log in logs), logs
        assert list(logs[0]) == list(expected)
        assert logs[0] == pytest.approx(expected, rel=1e-3, abs=1e-4)
    states = group.state()
    assert_same_bits(states)
    ((arrays, scalars),) = alone.state()
    assert scalars == pytest.approx(states[0][1])
    assert arrays.keys() == states[0][0].keys()
    for key, array in arrays.items():
        change = array - start[key]
        tolerance = 2e-3 * np.abs(change).max(initial=0.0) + 1e-7
        np.testing.assert_allclose(states[0][0][key], array, atol=tolerance, rtol=0, err_msg=key)
    return group, states


@BOTH
@ALGOS
@TORCH_TOO
@pytest.mark.slow_if(settings=[MORE])
@pytest.mark.parametrize("weights", SPLITS.values(), ids=SPLITS.keys())
@pytest.mark.parametrize("settings", [{}, MORE], ids=["defaults", "entropy"])
def test_several_learners_do_what_one_does(backend, spec, algo, weights, settings):
    check_group(backend, spec, algo, weights, 3, **settings)


@pytest.mark.tensorflow
@pytest.mark.parametrize("algo, spec", [("ppo", BOX), ("ppo-kl", DISCRETE), ("trpo", DISCRETE), ("vpg", BOX)])
def test_several_learners_in_tensorflow_do_what_one_does(algo, spec):
    settings = {**MORE, "max_grad_norm": 100.0, "log_std_lr": 1.0}  # compiled once for all
    group, states = check_group("tf", spec, algo, SPLITS["one without rows"], 2, **settings)
    parts, batch = split(SPLITS["one without rows"], 0), a_batch(spec, 0)
    batch[0][parts[2].rows[5]] = np.nan
    raised = group.learn(batch, parts)
    assert {type(e) for e in raised} == {FloatingPointError} and len({str(e) for e in raised}) == 1
    assert_same_bits(states + group.state())


@TORCH_TOO
def test_a_gradient_step_is_one_sum(backend):
    group = Group(backend, BOX, 2, algo="ppo", minibatches=5, epochs=1, kl_targ=0.0, vf_epochs=1)
    group.learn(a_batch(BOX, 0), split([0.5, 0.5], 0))
    policy = 5 + 3  # steps; mean, deviation, log
    value = 5 + 3  # steps; mean, deviation, log
    assert group.meeting.rounds == policy + value


@BOTH
@ALGOS
@TORCH_TOO
@pytest.mark.parametrize("field", [0, 2, 3], ids=["obs", "adv", "ret"])
def test_a_number_that_is_not_finite_in_one_part_raises_on_all(backend, spec, algo, field):
    group, parts = Group(backend, spec, 3, algo=algo), split([0.3, 0.0, 0.7], 0)
    group.learn(a_batch(spec, 0), parts)
    before = group.state()
    batch = a_batch(spec, 1)
    batch[field][parts[2].rows[5]] = np.nan
    raised = group.learn(batch, parts)
    assert {type(e) for e in raised} == {FloatingPointError} and len({str(e) for e in raised}) == 1
    after = group.state()
    if field == 3:  # the policy's update came before and was good
        before, after = (
            [({k: a for k, a in arrays.items() if "value" in k}, {}) for arrays, _ in s] for s in (before, after)
        )
    assert_same_bits(before + after)


@ALGOS
@TORCH_TOO
def test_a_loss_that_overflows_in_one_part_raises_on_all(backend, algo):
    group, parts = Group(backend, BOX, 2, algo=algo), split([0.3, 0.7], 0)
    before = group.state()
    batch = a_batch(BOX, 0)
    batch[1][parts[1].rows[3]] = 1e25
    raised = group.learn(batch, parts)
    assert {type(e) for e in raised} == {FloatingPointError}
    assert len({str(e) for e in raised}) == 1
    assert_same_bits(before + group.state())


@pytest.mark.slow
@ALGOS
@TORCH_TOO
def test_minibatches_may_have_fewer_rows_than_there_are_learners(backend, algo):
    check_group(backend, BOX, algo, [0.3, 0.3, 0.4], 2, minibatches=75, lr=1e-4, vf_lr=1e-4)


@TORCH_TOO
@pytest.mark.parametrize("n_learners", [1, 2, 3])
def test_any_number_of_learners_goes_on(backend, n_learners):
    first, second = a_batch(BOX, 0), a_batch(BOX, 1)
    alone = Group(backend, BOX, algo="ppo-kl")
    alone.learn(first)
    saved = alone.state()[0]
    (expected,) = alone.learn(second)
    group = Group(backend, BOX, n_learners, algo="ppo-kl")
    group.load_state(saved)
    assert_same_bits([*group.state(), saved])
    parts = split(np.full(n_learners, 1.0 / n_learners), 1) if n_learners > 1 else (None,)
    assert group.learn(second, parts)[0] == pytest.approx(expected, rel=1e-3, abs=1e-5)
    fewer = Group(backend, BOX, max(1, n_learners - 1), algo="ppo-kl")
    fewer.load_state(group.state()[0])
    assert_same_bits(fewer.state() + group.state())


def test_parts():
    assert len(Part(np.array([1, 2, 4]), 5)) == 3
    np.testing.assert_array_equal(Part.whole(3).rows, [0, 1, 2])


def test_learners_draw_the_same_minibatches_of_the_whole_batch():
    parts = split([0.2, 0.0, 0.8], 0, n=103)
    whole = list(shuffled(np.random.default_rng(5), Part.whole(103), 10))
    shared = [list(shuffled(np.random.default_rng(5), part, 10)) for part in parts]
    for i, (rows, n) in enumerate(whole):
        theirs = [part.rows[minibatches[i][0]] for part, minibatches in zip(parts, shared)]
        assert [minibatches[i][1] for minibatches in shared] == [n] * 3
        assert sorted(np.concatenate(theirs)) == sorted(rows)
        assert len(rows) == n in (10, 11)
