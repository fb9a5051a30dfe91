"""The twins: what the learners in PyTorch do, those in TensorFlow do as well, up to rounding, and go on from it."""

import functools
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from policies.actor import Actor, Spec, init_params
from policies.hyper import DEFAULTS, Hyper
from policies.minibatches import TooFewRows
from policies.share import ALONE

torch = pytest.importorskip("torch")
pytest.importorskip("tensorflow")
from test_rules import ROOT, imports  # noqa: E402
from test_shared_learners import Meeting, a_batch, assert_same_bits, split  # noqa: E402

from policies import pytorch, tf  # noqa: E402
from policies.tf import setup  # noqa: E402

BOX = Spec(obs_dim=6, act_dim=2, discrete=False, policy_hid=(16, 8), valfunc_hid=(12,))
DISCRETE = Spec(obs_dim=4, act_dim=5, discrete=True, policy_hid=(16,), valfunc_hid=(8, 8))
BOTH = pytest.mark.parametrize("spec", [BOX, DISCRETE], ids=["box", "discrete"])
ALGOS = pytest.mark.parametrize("algo", sorted(DEFAULTS))
FIELDS = ["obs", "act", "adv", "ret"]
PARAMETERS = ("/weight", "/bias", "/log_std")
FLOAT32_STEP = np.finfo(np.float32).eps
SETTINGS = {"lr": 1e-3, "minibatch_rows": 32, "epochs": 4, "vf_epochs": 4, "ent_coef": 0.01, "cg_subsample": 2}


class Learners:
    """A policy and a value learner of one framework."""

    def __init__(self, framework, spec, algo, threads=1, share=ALONE, **settings):
        self.params = init_params(spec, np.random.default_rng(0))
        made = (spec, self.params, Hyper(**{"algo": algo, **SETTINGS, **settings}), threads, "cpu", share)
        self.policy, self.value = framework.Policy(*made), framework.ValueFunction(*made)
        self.both = framework.SideBySide(self.policy, self.value)
        self.start = self.state()

    def learn(self, batch, part=None):
        """What both log."""
        return self.both.learn(*batch, part)

    def state(self):
        """(arrays, scalars) of both."""
        (p_arrays, p_scalars), (v_arrays, v_scalars) = self.policy.state(), self.value.state()
        return p_arrays | v_arrays, p_scalars | v_scalars

    def load_state(self, state):
        """Both take over `state`."""
        self.policy.load_state(*state)
        self.value.load_state(*state)


@functools.cache
def compiled(framework, spec, algo, **settings):
    """Learners that tests use in turns, because compiling takes longer than what is tested."""
    return Learners(framework, spec, algo, **settings)


def twins(spec, algo):
    """The two frameworks' learners, as new."""
    pair = [compiled(framework, spec, algo) for framework in (pytorch, tf)]
    for learners in pair:
        learners.load_state(learners.start)
    return pair


def assert_agree(ours, theirs, start, tolerance):
    """Two states agree in what has changed since `start`, to `tolerance` of the largest change.

    That is the largest in the network's parameters together, as rounding in conjugate gradients reaches all of them; in
    each of the other arrays it is its own.
    """
    assert ours[1] == pytest.approx(theirs[1])
    assert ours[0].keys() == theirs[0].keys()
    arrays = {key: array for key, array in theirs[0].items() if key != "value/last_owner"}  # which learner had a row
    change = {key: array - (0.0 if "last" in key else start[0][key]) for key, array in arrays.items()}
    largest = {key: np.abs(array).max(initial=0.0) for key, array in change.items()}
    for key, array in arrays.items():
        assert (ours[0][key].dtype, ours[0][key].shape) == (array.dtype, array.shape)
        alike = (
            [k for k in largest if k.endswith(PARAMETERS) and k[:5] == key[:5]] if key.endswith(PARAMETERS) else [key]
        )
        atol = tolerance * max(largest[k] for k in alike) + 1e-8
        np.testing.assert_allclose(ours[0][key], array, atol=atol, rtol=2 * FLOAT32_STEP, err_msg=key)


def assert_same_log(ours, theirs, tolerance):
    assert list(ours) == list(theirs)
    for key, value in theirs.items():
        floor = 1e-4 if key == "CgResidual" else 1e-6  # what is left of a gradient that has cancelled out
        assert ours[key] == pytest.approx(value, rel=tolerance, abs=floor), key


@BOTH
@ALGOS
def test_updates_agree(spec, algo):
    by_torch, by_tf = twins(spec, algo)
    assert_same_bits([by_torch.state(), by_tf.state()])
    for seed, (n, tolerance) in enumerate([(150, 1e-4), (131, 1e-3), (170, 1e-3)]):
        batch = a_batch(spec, seed, n)
        assert_same_log(by_tf.learn(batch), by_torch.learn(batch), tolerance)
        assert_agree(by_tf.state(), by_torch.state(), by_torch.start, tolerance)


@BOTH
@ALGOS
def test_either_goes_on_from_the_others_state(spec, algo):
    pair = twins(spec, algo)
    for one, other in (pair, pair[::-1]):
        one.learn(a_batch(spec, 0))
        saved = one.state()
        other.load_state(saved)
        assert_same_bits([saved, other.state()])
        assert_same_log(other.learn(a_batch(spec, 1)), one.learn(a_batch(spec, 1)), 1e-3)
        assert_agree(other.state(), one.state(), saved, 1e-3)


@BOTH
def test_the_networks_are_the_actors(spec):
    _, by_tf = twins(spec, "ppo")
    for seed in range(3):
        obs, act, *_ = a_batch(spec, seed)
        by_tf.learn(a_batch(spec, seed))
        by_tf.policy.weights(by_tf.params)
        by_tf.value.weights(by_tf.params)
        actor, policy = Actor(spec, by_tf.params), by_tf.policy
        dist = policy.forward(obs)
        if spec.discrete:
            np.testing.assert_allclose(actor.probs(obs), np.exp(dist[0]), atol=1e-5)
        else:
            np.testing.assert_allclose(actor.mean(obs), policy.net(obs), atol=1e-5)
        np.testing.assert_allclose(actor.logp(obs, act), policy.dist.logp(dist, act), atol=1e-5)
        np.testing.assert_allclose(actor.entropy(obs), policy.dist.entropy(dist), atol=1e-5)
        np.testing.assert_allclose(actor.value(obs), by_tf.value.net(obs)[:, 0], atol=1e-5)


def test_the_networks_are_keras_models():
    _, by_tf = twins(BOX, "ppo")
    for learner, n_layers in ((by_tf.policy, 3), (by_tf.value, 2)):
        assert isinstance(learner.net, setup.keras.Model)
        assert len(learner.net.trainable_variables) == len(learner.net.views)
        assert sum(key.endswith("weight") for key in learner.net.views) == n_layers


def failure(call):
    """(type, line) of what a call raises."""
    with pytest.raises((FloatingPointError, ValueError)) as raised:
        call()
    return raised.type, str(raised.value)


@ALGOS
@pytest.mark.parametrize("field", range(4), ids=FIELDS)
@pytest.mark.parametrize("bad", ["not finite", "another shape"])
def test_both_refuse_the_same_and_change_nothing(algo, field, bad):
    pair, batch = twins(BOX, algo), a_batch(BOX, 0)
    if bad == "not finite":
        batch[field].flat[7] = np.nan
    else:
        batch[field] = batch[field][:, :1] if field < 2 else batch[field].reshape(-1, 1)
    raised = [failure(lambda ours=ours: ours.learn(batch)) for ours in pair]
    assert raised[0] == raised[1]
    learners, owner = pair[1], pair[1].value if field == 3 else pair[1].policy
    arrays, scalars = owner.state()
    assert_same_bits([(arrays, {}), ({key: learners.start[0][key] for key in arrays}, {})])
    assert scalars.items() <= learners.start[1].items()


@ALGOS
def test_a_loss_that_overflows_raises_and_changes_nothing(algo):
    _, by_tf = twins(BOX, algo)
    obs, act, adv, ret = a_batch(BOX, 0)
    before = by_tf.state()
    with pytest.raises(FloatingPointError, match=r"not finite|is nan|is inf"):
        by_tf.value.fit(obs, ret * 1e30, {})
    act[3] = 1e25
    with pytest.raises(FloatingPointError, match=r"not finite|is nan|is inf"):
        by_tf.policy.update(obs, act, adv, {})
    assert_same_bits([by_tf.state(), before])


def test_parameters_that_do_not_fit_are_refused():
    raised = []
    for ours, theirs in zip(twins(BOX, "ppo"), twins(DISCRETE, "ppo")):
        raised.append(failure(lambda ours=ours, theirs=theirs: ours.load_state(theirs.state())))
        assert_same_bits([ours.state(), ours.start])
    assert raised[0] == raised[1]
    assert "policy/0/weight" in raised[0][1]


@pytest.mark.parametrize("algo", ["ppo", "ppo-kl"])
def test_same_bits_at_any_alignment_and_side_by_side(algo):
    one, other = twins(BOX, algo)[1], Learners(tf, BOX, algo, threads=2)
    assert not one.both.at_once(150) and other.both.at_once(150)
    for seed in range(3):
        batch = a_batch(BOX, seed)
        shifted = []
        for array in batch:
            room = np.zeros(2 * array.nbytes + 4, np.uint8)[4:].view(array.dtype)
            shifted.append(room.reshape(len(array), 2, *array.shape[1:])[:, 1])
            shifted[-1][...] = array
        assert one.learn(batch) == other.learn(shifted)
        for array in shifted:
            array[...] = 0  # the next batch may come to lie here
    assert_same_bits([one.state(), other.state()])


@ALGOS
def test_resumed_learners_go_on_to_the_same_bits(algo):
    _, by_tf = twins(BOX, algo)
    by_tf.learn(a_batch(BOX, 0))
    saved, ends = by_tf.state(), []
    for _ in range(2):
        by_tf.load_state(saved)
        by_tf.learn(a_batch(BOX, 1))
        by_tf.learn(a_batch(BOX, 2))
        ends.append(by_tf.state())
    assert_same_bits(ends)


@pytest.mark.parametrize("algo", ["ppo", "trpo"])
def test_compiled_once_for_any_number_of_rows(algo):
    _, learners = twins(BOX, algo)
    for n in range(100, 150):
        learners.learn(a_batch(BOX, n, n))
    functions = [vars(learners.policy.rule).get("_product")]
    for learner in (learners.policy, learners.value):
        functions += [*vars(learner).values(), learner.adam.step_flat]
    counts = [f.experimental_get_tracing_count() for f in functions if hasattr(f, "experimental_get_tracing_count")]
    assert len(counts) >= 9
    assert set(counts) == {0, 1}


def learn_together(group, batch, parts):
    """One update of learners that share a batch. Returns: what each logged, or raised."""
    return together(group, lambda ours, i: ours.learn([array[parts[i].rows] for array in batch], parts[i]))


def together(group, call):
    """`call(learners, index)` of each in a thread of its own. Returns: results or exceptions, in order."""
    with ThreadPoolExecutor(len(group)) as pool:
        futures = [pool.submit(call, learners, index) for index, learners in enumerate(group)]
        return [future.exception() or future.result() for future in futures]


@pytest.mark.parametrize("algo, spec", [("ppo", BOX), ("ppo-kl", DISCRETE), ("trpo", DISCRETE), ("vpg", BOX)])
def test_learners_that_share_a_batch_do_what_one_does(algo, spec):
    weights = [0.6, 0.0, 0.4]
    meeting = Meeting(3)
    group = [Learners(tf, spec, algo, share=meeting.share(index)) for index in range(3)]
    _, alone = twins(spec, algo)
    for seed in range(2):
        batch, parts = a_batch(spec, seed), split(weights, seed)
        logs = learn_together(group, batch, parts)
        assert all(log == logs[0] for log in logs)
        assert_same_log(logs[0], alone.learn(batch), 1e-3)
    states = together(group, lambda ours, i: ours.state())
    assert_same_bits(states)
    assert_agree(states[0], alone.state(), alone.start, 2e-3)
    batch[0][parts[2].rows[5]] = np.nan
    raised = learn_together(group, batch, parts)
    assert {(type(e), str(e)) for e in raised} == {(FloatingPointError, "a number in the batch is not finite: of obs")}
    assert_same_bits(states + together(group, lambda ours, i: ours.state()))


def test_minibatches_that_are_too_small_raise_on_all():
    meeting = Meeting(2)
    group = [Learners(tf, BOX, "ppo", share=meeting.share(index), minibatches=100) for index in range(2)]
    batch, parts = a_batch(BOX, 0), split([0.5, 0.5], 0)
    raised = learn_together(group, batch, parts)
    assert {type(e) for e in raised} == {TooFewRows}


@pytest.mark.parametrize("device", ["cuda:7", "gpu:7", "xpu"])
def test_a_device_that_is_not_there_is_refused(device):
    with pytest.raises(RuntimeError, match="TensorFlow has no such device here; it has: cpu"):
        tf.Policy(BOX, init_params(BOX, np.random.default_rng(0)), Hyper(), 1, device)


@pytest.mark.parametrize("folder, other", [("tf", "torch"), ("pytorch", "tensorflow")])
def test_the_twins_do_not_know_each_other(folder, other):
    for path in (ROOT / "policies" / folder).glob("*.py"):
        for name in imports(path):
            assert name.partition(".")[0] not in (other, "keras" if folder == "pytorch" else ""), path
            assert not name.startswith("policies.tf" if folder == "pytorch" else "policies.pytorch"), path
