"""The backends: each one's arithmetic against autograd in float64, and what one does the others do, up to rounding."""

import gc
import weakref
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from learning import ALGOS, BACKENDS, BOTH, BOX, DISCRETE, EACH, Rank0, a_batch, assert_same_bits, module

import policies
from policies.backend import as_array

OTHERS = pytest.mark.parametrize("other", EACH[1:])
PARAMETERS = ("/weight", "/bias", "/log_std")
FLOAT32_STEP = np.finfo(np.float32).eps
SETTINGS = {"lr": 1e-3, "ent_coef": 0.01}


def assert_agree(ours, theirs, start, tolerance):
    """Two states agree in what has changed since `start`, to `tolerance` of the largest change.

    That is the largest in the network's parameters together, as rounding in conjugate gradients reaches all of them; in
    each of the other arrays it is its own.
    """
    assert ours[1] == pytest.approx(theirs[1])
    assert ours[0].keys() == theirs[0].keys()
    change = {key: array - (0.0 if "last" in key else start[0][key]) for key, array in theirs[0].items()}
    largest = {key: np.abs(array).max(initial=0.0) for key, array in change.items()}
    for key, array in theirs[0].items():
        assert (ours[0][key].dtype, ours[0][key].shape) == (array.dtype, array.shape)
        alike = [k for k in largest if k.endswith(PARAMETERS) and k[:5] == key[:5]]
        atol = tolerance * max(largest[k] for k in (alike if key.endswith(PARAMETERS) else [key])) + 1e-8
        np.testing.assert_allclose(ours[0][key], array, atol=atol, rtol=2 * FLOAT32_STEP, err_msg=key)


def assert_same_log(ours, theirs, tolerance):
    assert list(ours) == list(theirs)
    for key, value in theirs.items():
        floor = 1e-4 if key == "CgResidual" else 1e-6  # what is left of a gradient that has cancelled out
        assert ours[key] == pytest.approx(value, rel=tolerance, abs=floor), key


@BOTH
@ALGOS
@OTHERS
def test_updates_agree(other, algo, spec):
    """Both action spaces, every algorithm, an entropy bonus, TRPO's curvature on half of the rows, a lag."""
    ours, theirs = (Rank0(backend, spec, algo, **SETTINGS) for backend in ("numpy", other))
    start = ours.state()
    assert_same_bits([start, theirs.state()])
    for seed, (n, tolerance) in enumerate([(150, 1e-4), (131, 1e-3), (170, 1e-3)]):
        batch = a_batch(spec, seed, n)
        noise = 0.1 * np.random.default_rng(seed).standard_normal(n)
        logp = (ours.actor.logp(*batch[:2]) + noise).astype(np.float32) if seed == 2 else None
        assert_same_log(theirs.learn(batch, logp=logp), ours.learn(batch, logp=logp), tolerance)
        assert_agree(theirs.state(), ours.state(), start, tolerance)


@BOTH
@ALGOS
@OTHERS
def test_either_goes_on_from_the_others_state(other, algo, spec):
    pair = [Rank0(backend, spec, algo, **SETTINGS) for backend in ("numpy", other)]
    for one, two in (pair, pair[::-1]):
        one.learn(a_batch(spec, 0))
        saved = one.state()
        two.load_state(saved)
        assert_same_bits([saved, two.state()])
        assert_same_log(two.learn(a_batch(spec, 1)), one.learn(a_batch(spec, 1)), 1e-3)
        assert_agree(two.state(), one.state(), saved, 1e-3)


class Reference:
    """The policy network on one batch, as functions of its parameters in float64, by torch's autograd.

    The distributions of actions are torch's.
    """

    def __init__(self, spec, obs, act, adv):
        self.torch = pytest.importorskip("torch")
        self.spec = spec
        self.obs, self.adv = (self.torch.tensor(x, dtype=self.torch.float64) for x in (obs, adv))
        self.act = self.torch.tensor(act)

    def out(self, net, flat, obs):
        """(outputs, log deviations or None) of a network. Args: flat: (P,) tensor."""
        views, start = {}, 0
        for key, shape in self.spec.shapes(net).items():
            views[key] = flat[start : start + int(np.prod(shape))].reshape(shape)
            start += int(np.prod(shape))
        for i in range(n_layers := len(self.spec.sizes(net)) - 1):
            obs = obs @ views[f"{net}/{i}/weight"] + views[f"{net}/{i}/bias"]
            obs = obs.tanh() if i < n_layers - 1 else obs
        return obs, views.get("policy/log_std")

    def dist(self, flat):
        """Torch's distribution."""
        out, log_std = self.out("policy", flat, self.obs)
        of = self.torch.distributions
        return of.Categorical(logits=out) if log_std is None else of.Independent(of.Normal(out, log_std.exp()), 1)

    def terms(self, flat, old):
        """Sums of divergences, entropies and surrogate losses, which `PolicyNet.gradient` weights."""
        now = self.dist(flat)
        ratio = (now.log_prob(self.act) - self.dist(old).log_prob(self.act)).exp()
        kl = self.torch.distributions.kl_divergence(self.dist(old), now)
        return self.torch.stack([kl.sum(), now.entropy().sum(), -(ratio * self.adv).sum()])

    def hessian(self, flat):
        """Second derivative of the sum of divergences from the policy itself."""
        same, divergence = self.dist(flat), self.torch.distributions.kl_divergence
        of = self.torch.autograd.functional.hessian
        return of(lambda x: divergence(same, self.dist(x)).sum(), flat, vectorize=True).numpy()

    def gradient(self, value, flat):
        """Gradient by the parameters, as an array."""
        return self.torch.autograd.grad(value, flat)[0].numpy()

    def flat(self, vector):
        """A vector to differentiate by."""
        return self.torch.tensor(vector, dtype=self.torch.float64, requires_grad=True)


def moved(backend, spec, size, **settings):
    """(network, its rows, Reference, parameters before and after), where the parameters have moved since `rows`."""
    rng = np.random.default_rng(3)
    obs, act, *_ = a_batch(spec, 0, 40)
    adv = rng.standard_normal(40).astype(np.float32)
    net, reference = Rank0(backend, spec, **settings).policy.net, Reference(spec, obs, act, adv)
    old = (net.vector() + 0.3 * rng.standard_normal(net.n_params)).astype(np.float32)
    net.set_vector(old)
    rows = net.rows(obs, act, adv, None)
    new = (old + size * rng.standard_normal(net.n_params)).astype(np.float32)
    net.set_vector(new)
    return net, rows, reference, reference.flat(old).detach(), reference.flat(new)


@BOTH
@BACKENDS
def test_outcome_and_its_gradient_against_autograd(backend, spec):
    net, rows, reference, old, new = moved(backend, spec, 0.05)
    terms = reference.terms(new, old)
    now = reference.dist(new)
    ratio = (now.log_prob(reference.act) - reference.dist(old).log_prob(reference.act)).exp()
    clipped = ((ratio - 1.0).abs() > 0.2).sum().item()
    outcome = net.outcome(rows)
    assert outcome.sums.dtype == np.float64
    np.testing.assert_allclose(outcome.sums[:3], terms.detach(), rtol=1e-4)
    assert 0 < outcome.sums[3] == clipped < 40
    assert now.entropy().sum().item() == pytest.approx(outcome.sums[1], rel=1e-5)
    for weights in [(0.7, -0.3, 1.1), (1.0, 0.0, 0.0), (0.0, -0.1, 1.0)]:
        expected = reference.gradient(terms @ reference.torch.tensor(weights, dtype=terms.dtype), new)
        terms = reference.terms(new, old)
        ours = as_array(net.outcome(rows).gradient(*weights))
        np.testing.assert_allclose(ours, expected, atol=1e-4 * np.abs(expected).max())


@BOTH
@BACKENDS
def test_clipped_surrogates_gradient_against_autograd(backend, spec):
    net, rows, reference, old, new = moved(backend, spec, 0.1, ent_coef=0.01)
    minibatch, n = np.array([3, 1, 17, 30, 8, 9, 25, 39, 0, 12]), 12  # two more rows are another learner's
    now = reference.dist(new)
    ratio = (now.log_prob(reference.act) - reference.dist(old).log_prob(reference.act)).exp()
    gain = reference.torch.minimum(ratio * reference.adv, ratio.clamp(0.8, 1.2) * reference.adv)
    loss = -(gain + 0.01 * now.entropy())[minibatch].sum() / n
    binds = (gain != ratio * reference.adv)[minibatch].sum()
    assert 0 < binds < 10
    expected = reference.gradient(loss, new)
    ours = as_array(net.loss_gradient(rows, minibatch, n))
    np.testing.assert_allclose(ours, expected, atol=1e-5 * np.abs(expected).max())


@BOTH
@BACKENDS
def test_gradient_of_the_squared_errors_against_autograd(backend, spec):
    net = Rank0(backend, spec).value.net
    obs, act, adv, ret = a_batch(spec, 0, 40)
    reference, rows = Reference(spec, obs, act, adv), net.rows(obs, ret)
    flat, minibatch, n = reference.flat(net.vector()), np.array([3, 1, 17, 30, 8]), 7
    values = reference.out("value", flat, reference.obs)[0][:, 0]
    np.testing.assert_allclose(net.values(rows), values.detach(), atol=1e-5)
    expected = reference.gradient((values - reference.torch.tensor(ret))[minibatch].square().sum() / n, flat)
    ours = as_array(net.loss_gradient(rows, minibatch, n))
    np.testing.assert_allclose(ours, expected, atol=1e-5 * np.abs(expected).max())


@BOTH
@BACKENDS
def test_fisher_products_against_a_dense_hessian(backend, spec):
    net, rows, _, _, new = moved(backend, spec, 0.05)
    hessian = Reference(spec, *a_batch(spec, 0, 40)[:3]).hessian(new.detach()) / 50
    product, rng = net.fisher(rows, 50), np.random.default_rng(0)
    for _ in range(3):
        vector = rng.standard_normal(net.n_params).astype(np.float32)
        expected = hessian @ vector
        np.testing.assert_allclose(as_array(product(vector)), expected, atol=1e-4 * np.abs(expected).max())


@BACKENDS
@pytest.mark.parametrize("length", [0.1, 100.0], ids=["short gradients", "long gradients"])
def test_adam_against_torch(backend, length):
    torch = pytest.importorskip("torch")
    net = Rank0(backend, BOX, "ppo-kl", max_grad_norm=0.5).policy.net  # its log_std_lr is 6
    leaves = {key: torch.tensor(view).requires_grad_() for key, view in net.by_name(net.vector()).items()}
    log_std = leaves["policy/log_std"]
    others = [leaf for leaf in leaves.values() if leaf is not log_std]
    reference = torch.optim.Adam([{"params": others}, {"params": [log_std], "lr": 6e-3}], lr=1e-3)
    rng = np.random.default_rng(0)
    for i in range(5):
        grad = rng.standard_normal(net.n_params).astype(np.float32)
        grad *= length * (i + 1) / np.linalg.norm(grad)
        for leaf, view in zip(leaves.values(), net.by_name(grad).values()):
            leaf.grad = torch.tensor(view)
        torch.nn.utils.clip_grad_norm_(leaves.values(), 0.5)
        reference.step()
        net.step(grad.copy(), 1e-3)
        for leaf, *views in zip(leaves.values(), *(net.by_name(net.vector(i)).values() for i in range(3))):
            state = reference.state[leaf]
            for expected, view in zip((leaf.detach(), state["exp_avg"], state["exp_avg_sq"]), views):
                np.testing.assert_allclose(view, expected, atol=1e-6, rtol=1e-4)
    assert net.steps == 5


@BACKENDS
def test_a_gradient_of_zero_moves_nothing(backend):
    net = Rank0(backend, BOX).policy.net
    before = net.vector()
    net.step(np.zeros(net.n_params, np.float32), 1.0)
    np.testing.assert_array_equal(net.vector(), before)


@pytest.mark.tensorflow
@pytest.mark.parametrize("algo", ["ppo", "trpo"])
def test_tensorflow_compiles_once_for_any_number_of_rows(algo):
    rank0 = Rank0("tf", BOX, algo, number=9)
    for n in range(100, 130):
        rank0.learn(a_batch(BOX, n, n))
    functions = [f for learner in (rank0.policy, rank0.value) for f in vars(learner.net).values()]
    counts = [f.experimental_get_tracing_count() for f in functions if hasattr(f, "experimental_get_tracing_count")]
    assert len(counts) == 10
    assert set(counts) <= {0, 1}


@pytest.mark.tensorflow
def test_tensorflows_networks_are_keras_models():
    keras = module("tf").setup.keras
    rank0 = Rank0("tf", BOX)
    for learner, n_layers in ((rank0.policy, 3), (rank0.value, 2)):
        assert isinstance(learner.net.model, keras.Model)
        assert len(learner.net.model.trainable_variables) == 2 * n_layers


def test_torchs_networks_are_modules():
    torch = pytest.importorskip("torch")
    rank0 = Rank0("torch", BOX)
    for learner, n_layers in ((rank0.policy, 3), (rank0.value, 2)):
        assert isinstance(learner.net.module, torch.nn.Module)
        rank0.learn(a_batch(BOX, 0))
        named = dict(learner.net.module.named_parameters())
        assert len(named) == 2 * n_layers
        for key, parameter in named.items():
            view = rank0.params[f"{learner.net.name}/{key.replace('.', '/')}"]
            np.testing.assert_array_equal(parameter.detach(), view)


@BACKENDS
def test_no_batch_is_left_after_the_next(backend, monkeypatch):
    rank0, seen = Rank0(backend, BOX, "ppo-kl"), []
    for net in (rank0.policy.net, rank0.value.net):

        def rows(*arrays, made=net.rows):
            of_batch = made(*arrays)
            seen.append(weakref.ref(of_batch.fields[0]))
            return of_batch

        monkeypatch.setattr(net, "rows", rows)
    for seed in range(4):
        rank0.learn(a_batch(BOX, seed))
    gc.collect()
    assert len(seen) >= 8
    assert sum(array() is not None for array in seen) <= 2


def test_every_backend_is_tested():
    folders = {path.parent.name for path in Path(policies.__file__).parent.glob("*/__init__.py")}
    assert folders == {"numpy", "torch", "tf"}


@BACKENDS
def test_the_divergence_is_finite_at_a_probability_of_zero(backend):
    """As on Pong: float32 has no number below 1e-45, and the new policy's logits may lie further apart than that."""
    net, rows, reference, old, new = moved(backend, DISCRETE, 0.05)
    new = new.detach().clone()
    new[-1] += 300.0  # bias of the last logit
    net.set_vector(new.numpy().astype(np.float32))
    kl = reference.terms(new, old)[0].item()
    assert kl > 1000 and net.outcome(rows).sums[0] == pytest.approx(kl, rel=1e-4)


@BACKENDS
def test_settings_that_change_between_updates_are_read_anew(backend):
    """As --hook changes them: what is compiled must not keep the first ones."""
    found = set()
    for change in ({}, {"clip": 0.01}, {"ent_coef": 5.0}, {"lr": 1e-2}, {"epochs": 1}):
        rank0 = Rank0(backend, BOX, minibatches=2)
        obs, act, adv, _ = a_batch(BOX, 0)
        rank0.policy.update(obs, act, adv)
        rank0.policy.hyper = rank0.policy.net.hyper = replace(rank0.policy.hyper, **change)
        rank0.policy.update(obs, act, adv)
        found.add(rank0.policy.net.vector().tobytes())
    assert len(found) == 5
