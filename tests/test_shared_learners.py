"""Learners that share a batch: together they do what one does on the whole of it, or fail together."""

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from policies.actor import Spec, init_params
from policies.hyper import DEFAULTS, Hyper
from policies.minibatches import TooFewRows, shuffled
from policies.share import Part

pytest.importorskip("torch")
from policies.pytorch import Policy, SideBySide, ValueFunction

BOX = Spec(obs_dim=6, act_dim=2, discrete=False, policy_hid=(16, 8), valfunc_hid=(12,))
DISCRETE = Spec(obs_dim=4, act_dim=5, discrete=True, policy_hid=(16,), valfunc_hid=(8, 8))
BOTH = pytest.mark.parametrize("spec", [BOX, DISCRETE], ids=["box", "discrete"])
ALGOS = pytest.mark.parametrize("algo", sorted(DEFAULTS))
SPLITS = {"even": [0.5, 0.5], "uneven": [0.2, 0.7, 0.1], "one without rows": [0.6, 0.0, 0.4]}
TIMEOUT_S = 20  # a learner that another left behind in a sum gives up after so long


class Meeting:
    """Learners in threads: their sums are taken in the order of their numbers."""

    def __init__(self, n_learners):
        self.n_learners = n_learners
        self.slots = [None] * n_learners
        self.barrier = threading.Barrier(n_learners, timeout=TIMEOUT_S)
        self.rounds = 0

    def share(self, index):
        """The share of one learner."""
        return ShareOfThread(self, index)


class ShareOfThread:
    """See policies.share.Alone."""

    def __init__(self, meeting, index):
        self._meeting, self.n_learners, self.index = meeting, meeting.n_learners, index

    def sum(self, x):
        """Waits for all; NumPy adds them up in one order."""
        assert x.flags.c_contiguous and x.dtype in (np.float32, np.float64)
        meeting = self._meeting
        meeting.slots[self.index] = x.copy()
        meeting.barrier.wait()
        assert {(s.shape, s.dtype) for s in meeting.slots} == {(x.shape, x.dtype)}
        x[...] = sum(meeting.slots[1:], meeting.slots[0])
        meeting.rounds += self.index == 0
        meeting.barrier.wait()
        return x


class Group:
    """Learners that share their batches, each in its own thread; a group of one holds them whole."""

    def __init__(self, spec, n_learners=1, **settings):
        self.spec, self.meeting = spec, Meeting(n_learners)
        hyper = Hyper(**{"minibatch_rows": 32, "epochs": 3, "vf_epochs": 3, **settings})
        self.learners, self.params = [], []
        for index in range(n_learners):
            params = init_params(spec, np.random.default_rng(0))
            share = {"share": self.meeting.share(index)} if n_learners > 1 else {}
            made = (spec, params, hyper, 2, "cpu")
            self.learners.append(SideBySide(Policy(*made, **share), ValueFunction(*made, **share)))
            self.params.append(params)

    def together(self, call):
        """`call(learners, index)` of each in a thread of its own. Returns: results or exceptions, in order."""
        with ThreadPoolExecutor(len(self.learners)) as pool:
            futures = [pool.submit(call, learners, index) for index, learners in enumerate(self.learners)]
            return [future.exception() or future.result() for future in futures]

    def learn(self, batch, parts=(None,)):
        """One update on the rows of `parts`. Returns: what each logged, or raised."""

        def call(learners, index):
            part = parts[index]
            return learners.learn(*(batch if part is None else [array[part.rows] for array in batch]), part=part)

        return self.together(call)

    def state(self):
        """The state of each, with a copy of the exported weights."""

        def call(learners, index):
            arrays, scalars = {}, {}
            for learner in (learners.policy, learners.val_func):
                more_arrays, more_scalars = learner.state()
                arrays, scalars = arrays | more_arrays, scalars | more_scalars
            return arrays, scalars

        return self.together(call)

    def load_state(self, state):
        """Gives all the same state."""

        def call(learners, index):
            learners.policy.load_state(*state)
            learners.val_func.load_state(*state)

        assert self.together(call) == [None] * len(self.learners)


def a_batch(spec, seed, n=150):
    """(obs, act, adv, ret)."""
    rng = np.random.default_rng(seed)
    obs = rng.standard_normal((n, spec.obs_dim), dtype=np.float32)
    act = rng.integers(spec.act_dim, size=n) if spec.discrete else 0.6 * rng.standard_normal((n, spec.act_dim))
    gain = (act == 2) * 1.0 if spec.discrete else -np.square(act - 0.5).sum(1)
    act = act if spec.discrete else act.astype(np.float32)
    return [obs, act, (3.0 * gain + 7.0).astype(np.float32), (0.5 * obs[:, 0] + 1.0).astype(np.float32)]


def split(weights, seed, n=150):
    """Parts of a batch, as large as `weights` say, of rows from anywhere in it."""
    order = np.random.default_rng(seed).permutation(n)
    pieces = np.split(order, np.round(np.cumsum(weights)[:-1] * n).astype(int))
    return [Part(np.sort(rows), n) for rows in pieces]


def assert_same_bits(states):
    for arrays, scalars in states[1:]:
        assert scalars == states[0][1]
        for key, array in arrays.items():
            assert array.tobytes() == states[0][0][key].tobytes(), key


@BOTH
@ALGOS
@pytest.mark.parametrize("weights", SPLITS.values(), ids=SPLITS.keys())
@pytest.mark.parametrize("settings", [{}, {"ent_coef": 0.01, "cg_subsample": 3}], ids=["defaults", "entropy"])
def test_several_learners_do_what_one_does_on_the_whole_batch(spec, algo, weights, settings):
    alone, group = Group(spec, algo=algo, **settings), Group(spec, len(weights), algo=algo, **settings)
    start = alone.state()[0][0]
    for seed in range(3):
        batch = a_batch(spec, seed)
        (expected,) = alone.learn(batch)
        logs = group.learn(batch, split(weights, seed))
        assert all(log == logs[0] for log in logs)
        assert list(logs[0]) == list(expected)
        assert logs[0] == pytest.approx(expected, rel=1e-3, abs=1e-5)
    states = group.state()
    assert_same_bits(states)
    ((arrays, scalars),) = alone.state()
    assert scalars == pytest.approx(states[0][1])
    assert arrays.keys() == states[0][0].keys()
    for key in arrays.keys() - {"value/last_owner"}:  # which learner had a row
        array = arrays[key]
        change = array - (0.0 if "last" in key else start[key])
        tolerance = 2e-3 * np.abs(change).max(initial=0.0) + 1e-7
        np.testing.assert_allclose(states[0][0][key], array, atol=tolerance, rtol=0, err_msg=key)


def test_a_gradient_step_is_one_sum():
    group = Group(BOX, 2, algo="ppo", minibatches=5, epochs=1, kl_targ=0.0, vf_epochs=1)
    group.learn(a_batch(BOX, 0), split([0.5, 0.5], 0))
    policy = 5 + 5  # steps; finite, mean, deviation, clipped share, log
    value = 5 + 4  # steps; finite, mean, deviation, log
    assert group.meeting.rounds == policy + value


@BOTH
@ALGOS
@pytest.mark.parametrize("field", [0, 2, 3], ids=["obs", "adv", "ret"])
def test_a_number_that_is_not_finite_in_one_part_raises_on_all(spec, algo, field):
    group, parts = Group(spec, 3, algo=algo), split([0.3, 0.0, 0.7], 0)
    group.learn(a_batch(spec, 0), parts)
    before = group.state()
    batch = a_batch(spec, 1)
    batch[field][parts[2].rows[5]] = np.nan
    raised, name = group.learn(batch, parts), ("obs", "act", "adv", "ret")[field]
    assert {(type(e), str(e)) for e in raised} == {
        (FloatingPointError, f"a number in the batch is not finite: of {name}")
    }
    if field == 3:  # the policy's update came before and was good
        before, after = ([(a | {}, s) for a, s in states] for states in (before, group.state()))
        assert all((x[0]["value/0/weight"] == y[0]["value/0/weight"]).all() for x, y in zip(before, after))
    else:
        assert_same_bits(before + group.state())


@ALGOS
def test_a_loss_that_overflows_in_one_part_raises_on_all(algo):
    group, parts = Group(BOX, 2, algo=algo), split([0.3, 0.7], 0)
    before = group.state()
    batch = a_batch(BOX, 0)
    batch[1][parts[1].rows[3]] = 1e25
    raised = group.learn(batch, parts)
    assert {type(e) for e in raised} == {FloatingPointError}
    assert len({str(e) for e in raised}) == 1
    assert_same_bits(before + group.state())


@ALGOS
def test_minibatches_that_are_too_small_raise_on_all(algo):
    group = Group(BOX, 3, algo=algo, minibatches=75)
    before = group.state()
    raised = group.learn(a_batch(BOX, 0), split([0.3, 0.3, 0.4], 0))
    assert {type(e) for e in raised} == {TooFewRows}
    (line,) = {str(e) for e in raised}
    assert line.startswith(
        "--parallel average with --nprocs 3: a minibatch of 2 rows has fewer than one for each process; "
    )
    if algo == "ppo":  # the policies of the others, whose turn is before the value function's, have no minibatches
        assert_same_bits(before + group.state())


@pytest.mark.parametrize("n_learners", [1, 2, 3])
def test_replay_goes_on_with_any_number_of_learners(n_learners):
    first, second = a_batch(BOX, 0), a_batch(BOX, 1)
    alone = Group(BOX, algo="ppo-kl")
    alone.learn(first)
    saved = alone.state()[0]
    group = Group(BOX, n_learners, algo="ppo-kl")
    group.load_state(saved)
    assert_same_bits([*group.state(), saved])
    (expected,) = alone.learn(second)
    parts = split(np.full(n_learners, 1.0 / n_learners), 1) if n_learners > 1 else (None,)
    assert group.learn(second, parts)[0] == pytest.approx(expected, rel=1e-3, abs=1e-5)
    assert_same_bits(group.state())


def test_parts():
    part = Part(np.array([1, 2, 4]), 5)
    np.testing.assert_array_equal(part.positions(), [-1, 0, 1, -1, 2])
    assert (len(part), part.weight) == (3, 0.6)
    both = part.followed_by(Part(np.array([0, 2]), 3))
    np.testing.assert_array_equal(both.rows, [1, 2, 4, 5, 7])
    assert both.total == 8
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
