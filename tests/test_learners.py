"""The learners: they agree with the actor, they learn, they resume, and they refuse what is not finite."""

import numpy as np
import pytest

from policies.actor import Actor, Spec, init_params
from policies.hyper import Hyper
from policies.minibatches import n_minibatches, n_threads, stream
from policies.share import Part
from trainer.config import parse

torch = pytest.importorskip("torch")
from policies.pytorch import Policy, SideBySide, ValueFunction  # noqa: E402
from policies.pytorch.adam import Adam  # noqa: E402
from policies.pytorch.batches import shuffled, torch_threads  # noqa: E402
from policies.pytorch.dists import Categorical, Gaussian  # noqa: E402
from policies.pytorch.nets import Net  # noqa: E402
from policies.pytorch.policy import Batch  # noqa: E402
from policies.trust_region import conjugate_gradients  # noqa: E402

BOX = Spec(obs_dim=11, act_dim=3, discrete=False, policy_hid=(16, 8), valfunc_hid=(12,))
DISCRETE = Spec(obs_dim=4, act_dim=5, discrete=True, policy_hid=(16,), valfunc_hid=(8, 8, 8))
BOTH = pytest.mark.parametrize("spec", [BOX, DISCRETE], ids=["box", "discrete"])
ALGOS = pytest.mark.parametrize("algo", ["ppo", "ppo-kl", "trpo", "vpg"])
N = 150


class Log(dict):
    """A logger that keeps the last numbers."""

    log = dict.update


class Rank0:
    """An actor and its two learners, with a synthetic batch that favours a known action in every state."""

    def __init__(self, spec, seed=0, **settings):
        self.params = init_params(spec, np.random.default_rng(seed))
        self.spec = spec
        self.actor = Actor(spec, self.params)
        self.config = Hyper(**{"minibatch_rows": 32, "epochs": 4, "vf_epochs": 4, **settings})
        self.policy = Policy(spec, self.params, self.config)
        self.value = ValueFunction(spec, self.params, self.config)
        self.log = Log()

    def batch(self, seed):
        """(obs, act, adv, ret) as the actor would draw them."""
        rng = np.random.default_rng(seed)
        obs = rng.standard_normal((N, self.spec.obs_dim), dtype=np.float32)
        act = np.array([self.actor.act(row, z) for row, z in zip(obs, self.actor.noise(rng, N))])
        rew = (act == 2) * 1.0 if self.spec.discrete else -np.square(act - 0.5).sum(axis=1)
        return obs, act, rew.astype(np.float32), (0.5 * obs[:, 0] + 1.0).astype(np.float32)

    def learn(self, batch):
        obs, act, adv, ret = batch
        self.policy.update(obs, act, adv, self.log)
        self.value.fit(obs, ret, self.log)
        self.export()

    def export(self):
        self.policy.weights(self.params)
        self.value.weights(self.params)
        self.actor.refresh()

    def state(self):
        (p_arrays, p_scalars), (v_arrays, v_scalars) = self.policy.state(), self.value.state()
        assert not p_arrays.keys() & v_arrays.keys() and not p_scalars.keys() & v_scalars.keys()
        return p_arrays | v_arrays, p_scalars | v_scalars

    def load_state(self, state):
        self.policy.load_state(*state)
        self.value.load_state(*state)
        self.export()


def assert_same_state(one, other):
    assert one[1] == other[1]
    assert one[0].keys() == other[0].keys()
    for key, array in one[0].items():
        np.testing.assert_array_equal(array, other[0][key], err_msg=key)


@BOTH
@ALGOS
def test_actor_and_learner_agree(spec, algo):
    rank0 = Rank0(spec, algo=algo, lr=1e-2)
    for seed in range(3):
        obs, act, _, _ = batch = rank0.batch(seed)
        actor, dist = rank0.actor, rank0.policy.dist
        with torch.no_grad():
            out = rank0.policy.net.forward(torch.tensor(obs))
            dist.set(out)
            logp = dist.logp(torch.tensor(act))
            value = rank0.value.net.forward(torch.tensor(obs))[:, 0]
        outputs = actor.probs(obs) if spec.discrete else actor.mean(obs)
        np.testing.assert_allclose(outputs, out.softmax(1) if spec.discrete else out, atol=1e-5)
        np.testing.assert_allclose(actor.logp(obs, act), logp, atol=1e-5)
        np.testing.assert_allclose(actor.entropy(obs).mean(), dist.entropy(), atol=1e-5)
        np.testing.assert_allclose(actor.value(obs), value, atol=1e-5)
        before = {key: array.copy() for key, array in rank0.params.items()}
        rank0.learn(batch)
        assert all((before[key] != array).any() for key, array in rank0.params.items())


@BOTH
@ALGOS
def test_update_lowers_the_surrogate_and_reports_its_divergence(spec, algo):
    rank0 = Rank0(spec, algo=algo, lr=3e-3, epochs=10)
    obs, act, adv, _ = rank0.batch(0)
    old_logp = rank0.actor.logp(obs, act)
    rank0.policy.update(obs, act, adv, rank0.log)
    rank0.export()
    ratio = np.exp(rank0.actor.logp(obs, act) - old_logp)
    loss = -(ratio * (adv - adv.mean()) / adv.std()).mean()
    assert loss < -0.01
    assert rank0.log["LossPi"] == pytest.approx(loss, abs=1e-4)
    assert rank0.log["Entropy"] == pytest.approx(rank0.actor.entropy(obs).mean(), abs=1e-4)
    assert 0.0 < rank0.log["KL"] < 0.5


@BOTH
@ALGOS
def test_policy_solves_a_bandit(spec, algo):
    rank0 = Rank0(spec, algo=algo, lr=1e-2, kl_targ=0.02 if algo == "ppo-kl" else None)
    first = rank0.batch(0)[2].mean()
    for seed in range(60):
        obs, act, adv, _ = rank0.batch(seed)
        rank0.policy.update(obs, act, adv, rank0.log)
        rank0.export()
    last = rank0.batch(999)[2].mean()
    assert (first < 0.3 and last > 0.9) if spec.discrete else (first < -1.0 and last > -0.4)


@ALGOS
def test_value_function_fits(algo):
    rank0 = Rank0(BOX, algo=algo, vf_lr=1e-2)
    for seed in range(20):
        obs, _, _, ret = rank0.batch(seed)
        rank0.value.fit(obs, ret, rank0.log)
    rank0.export()
    assert rank0.log["LossV"] == pytest.approx(np.square(rank0.actor.value(obs) - ret).mean(), rel=1e-3)
    assert rank0.log["LossV"] < 0.02
    assert rank0.log["ExplainedVar"] > 0.9


def test_value_function_of_ppo_kl_replays_the_batch_before():
    one, other = Rank0(BOX, algo="ppo-kl"), Rank0(BOX, algo="ppo-kl")
    first, second = one.batch(0), one.batch(1)
    one.learn(first)
    other.learn(first)
    other.value.last[1].add_(1.0)
    one.learn(second)
    other.learn(second)
    assert (one.params["value/0/weight"] != other.params["value/0/weight"]).any()
    np.testing.assert_array_equal(one.params["policy/0/weight"], other.params["policy/0/weight"])


@BOTH
@ALGOS
def test_same_bits_on_repeat_and_at_any_alignment(spec, algo):
    one, other = Rank0(spec, algo=algo), Rank0(spec, algo=algo)
    for seed in range(3):
        batch = one.batch(seed)
        one.learn(batch)
        torch.manual_seed(seed)
        shifted = []
        for array in batch:
            foreign = np.zeros((N, 2, *array.shape[1:]), array.dtype).view(np.uint8).ravel()
            raw = np.concatenate([np.zeros(4, np.uint8), foreign])[4 : 4 + foreign.size].view(array.dtype)
            strided = raw.reshape(N, 2, *array.shape[1:])[:, 1]
            strided[...] = array
            shifted.append(strided)
        other.learn(shifted)
        assert_same_state(one.state(), other.state())


@BOTH
@ALGOS
def test_resumed_learners_go_on_to_the_same_bits(spec, algo):
    one = Rank0(spec, algo=algo)
    for seed in range(3):
        one.learn(one.batch(seed))
    saved = one.state()
    kept = ({key: array.copy() for key, array in saved[0].items()}, dict(saved[1]))
    other = Rank0(spec, seed=5, algo=algo)
    other.load_state(saved)
    assert_same_state(other.state(), saved)
    for seed in range(3, 6):
        batch = one.batch(seed)
        one.learn(batch)
        other.learn(batch)
    assert_same_state(one.state(), other.state())
    assert_same_state(saved, kept)


@BOTH
@ALGOS
@pytest.mark.parametrize("field", [0, 2, 3], ids=["obs", "adv", "ret"])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_number_that_is_not_finite_raises_and_changes_nothing(spec, algo, field, bad):
    rank0 = Rank0(spec, algo=algo)
    rank0.learn(rank0.batch(0))
    before = rank0.state()
    batch = rank0.batch(1)
    batch[field].flat[7] = bad
    obs, act, adv, ret = batch
    calls = [lambda: rank0.policy.update(obs, act, adv, Log()), lambda: rank0.value.fit(obs, ret, Log())]
    if field == 3:
        calls = calls[1:]
    elif field == 2:
        calls = calls[:1]
    for call in calls:
        name = ("obs", "act", "adv", "ret")[field]
        with pytest.raises(FloatingPointError, match=f"^a number in the batch is not finite: of {name}$"):
            call()
    assert_same_state(rank0.state(), before)


@ALGOS
def test_a_loss_that_overflows_raises_and_changes_nothing(algo):
    rank0 = Rank0(BOX, algo=algo)
    rank0.learn(rank0.batch(0))
    before = rank0.state()
    obs, act, adv, ret = rank0.batch(1)
    threads = torch.get_num_threads()
    with pytest.raises(FloatingPointError):
        rank0.value.fit(obs, ret * 1e30, Log())
    act[3] = 1e25
    with pytest.raises(FloatingPointError, match=r"gradient is not finite|LossPi|KL"):
        rank0.policy.update(obs, act, adv, Log())
    assert_same_state(rank0.state(), before)
    assert torch.get_num_threads() == threads


def test_parameters_that_do_not_fit_are_refused():
    rank0 = Rank0(BOX)
    before = rank0.state()
    with pytest.raises(ValueError, match="policy/0/weight"):
        rank0.policy.load_state(*Rank0(DISCRETE).state())
    assert_same_state(rank0.state(), before)


@pytest.mark.parametrize("field", [0, 1, 2, 3], ids=["obs", "act", "adv", "ret"])
def test_arrays_of_another_shape_are_refused(field):
    rank0 = Rank0(BOX)
    batch = list(rank0.batch(0))
    batch[field] = batch[field][:, :1] if field < 2 else batch[field].reshape(-1, 1)
    obs, act, adv, ret = batch
    with pytest.raises(ValueError, match="expected an array of shape"):
        rank0.policy.update(obs, act, adv, Log())
        rank0.value.fit(obs, ret, Log())


def test_unknown_algo_is_refused():
    with pytest.raises(ValueError, match=r"'sarsa'.*ppo, ppo-kl, trpo, vpg"):
        Rank0(BOX, algo="sarsa")


def test_settings_that_are_given_are_kept():
    hyper = Hyper(algo="ppo-kl", epochs=3, kl_targ=0.01, seed=4).resolve()
    assert (hyper.epochs, hyper.kl_targ, hyper.seed) == (3, 0.01, 4)
    assert None not in vars(hyper).values()


@pytest.mark.parametrize(
    "algo, own",
    [
        ("ppo", {"lr": 0.1, "epochs": 3, "clip": 0.3, "minibatch_rows": 6}),
        ("trpo", {"cg_iters": 7, "cg_damping": 0.7, "minibatches": 5}),
    ],
)
def test_the_command_line_reaches_the_learners(algo, own):
    given = own | {"vf_lr": 0.2, "vf_epochs": 4, "kl_targ": 0.4, "ent_coef": 0.5, "max_grad_norm": 0.6, "seed": 8}
    hyper = parse(["Env-v0", "--algo", algo, *(f"--{key}={value}" for key, value in given.items())]).hyper
    assert {key: getattr(hyper, key) for key in given} == given
    assert hyper.algo == algo and None not in vars(hyper).values()


@pytest.mark.parametrize(
    "option, line",
    [
        ("--kl_targ=0", "--kl_targ is 0.0; it must be above 0"),
        ("--vf_lr=0", "--vf_lr is 0.0; it must be above 0"),
        ("--max_grad_norm=nan", "--max_grad_norm is nan; it must be above 0"),
        ("--cg_iters=0", "--cg_iters is 0; it must be 1 or more"),
        ("--cg_damping=-1", "--cg_damping is -1.0; it must be 0 or more"),
        ("--minibatch_rows=0", "--minibatch_rows is 0; it must be 1 or more"),
    ],
)
def test_settings_out_of_range_are_refused_in_one_line(option, line, capsys):
    with pytest.raises(SystemExit) as ended:
        parse(["Env-v0", "--algo", "trpo", option])
    assert ended.value.code == 2
    assert capsys.readouterr().err == f"train.py: {line} (see --help)\n"


def test_ppo_stops_at_the_target_divergence():
    rank0 = Rank0(BOX, algo="ppo", lr=1e-2, epochs=50, kl_targ=0.02)
    rank0.learn(rank0.batch(0))
    assert rank0.log["StopIter"] < 50
    assert rank0.log["KL"] > 0.02


def test_ppo_kl_adapts_its_penalty_and_stops_early():
    rank0 = Rank0(BOX, algo="ppo-kl", lr=0.1, epochs=50)
    rank0.learn(rank0.batch(0))
    assert rank0.log["KL"] > 4 * 0.003
    assert rank0.log["StopIter"] < 50
    assert rank0.policy.rule.beta == 1.5
    rule = rank0.policy.rule
    for _ in range(20):
        rule.adapt(1.0)
    assert rule.beta == 35.0
    assert 0.05 < rule.lr_mult < 0.1
    for _ in range(40):
        rule.adapt(0.0)
    assert rule.beta == pytest.approx(1 / 35)
    assert 10.0 < rule.lr_mult < 15.0


def fisher(spec, **settings):
    """(Rank0 after an update, its batch on the device, function that multiplies by its Fisher matrix)."""
    rank0 = Rank0(spec, algo="trpo", **settings)
    rank0.learn(rank0.batch(0))
    obs, act, adv, _ = rank0.batch(1)
    with torch.no_grad():
        batch = Batch(rank0.policy, obs, act, adv, Part.whole(N))
        return rank0, batch, rank0.policy.rule.fisher(rank0.policy, batch, np.random.default_rng(0))


def mean_kl(spec, obs, old, flat, net):
    """The divergence as a function of the flat parameters, by autograd."""
    views, out = net.by_name(flat), obs
    for i in range(len(spec.policy_hid) + 1):
        out = (out if i == 0 else out.tanh()) @ views[f"policy/{i}/weight"] + views[f"policy/{i}/bias"]
    new = autograd_distribution(spec.discrete, out, views.get("policy/log_std"))
    return torch.distributions.kl_divergence(old or new, new).mean(), new


@BOTH
def test_fisher_products_against_autograd_twice(spec):
    rank0, batch, product = fisher(spec, cg_damping=0.0)
    net = rank0.policy.net
    with torch.no_grad():
        old = mean_kl(spec, batch.obs, None, net.flat, net)[1]
    flat = net.flat.clone().requires_grad_()
    (grad,) = torch.autograd.grad(mean_kl(spec, batch.obs, old, flat, net)[0], flat, create_graph=True)
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        vector = torch.randn(flat.shape, generator=generator)
        (expected,) = torch.autograd.grad(grad @ vector, flat, retain_graph=True)
        with torch.no_grad():
            ours = product(vector.double()).float()
        torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-4)


@BOTH
def test_conjugate_gradients_against_a_dense_solve(spec):
    rank0, _, product = fisher(spec, cg_damping=0.1)
    size = rank0.policy.net.flat.numel()
    b = torch.randn(size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    with torch.no_grad():
        dense = torch.stack([product(unit) for unit in torch.eye(size, dtype=torch.float64)])
        torch.testing.assert_close(dense, dense.T, atol=1e-5, rtol=1e-4)
        assert torch.linalg.eigvalsh(dense).min() > 0.0999
        x, left = conjugate_gradients(product, b, 50)
    torch.testing.assert_close(x, torch.linalg.solve(dense, b), atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(left, b - dense @ x, atol=1e-3, rtol=0)
    assert left.norm() < 1e-4 * b.norm()


def test_fisher_matrix_of_a_part_of_rows_that_are_all_alike():
    results = []
    for subsample in (1, 7):
        rank0 = Rank0(BOX, algo="trpo", cg_subsample=subsample)
        obs, act, adv, _ = rank0.batch(0)
        obs[:] = obs[0]
        with torch.no_grad():
            batch = Batch(rank0.policy, obs, act, adv, Part.whole(N))
            product = rank0.policy.rule.fisher(rank0.policy, batch, np.random.default_rng(0))
            results.append(product(torch.linspace(-1, 1, rank0.policy.net.flat.numel(), dtype=torch.float64)))
    torch.testing.assert_close(*results, atol=1e-6, rtol=1e-5)


@BOTH
def test_trpo_stays_within_its_bound(spec):
    rank0 = Rank0(spec, algo="trpo", kl_targ=0.02, cg_damping=0.01)
    for seed in range(5):
        rank0.learn(rank0.batch(seed))
        assert 0.005 < rank0.log["KL"] <= 0.02
        assert rank0.log["LossPi"] < -0.02
        assert rank0.log["StepFrac"] == pytest.approx(0.8 ** rank0.log["BacktrackIters"])
        assert 0.0 <= rank0.log["CgResidual"] < 0.5


def test_trpo_goes_back_until_it_is_within_its_bound():
    rank0 = Rank0(BOX, algo="trpo", kl_targ=1.0, cg_damping=0.0)  # where the quadratic model is far off
    rank0.learn(rank0.batch(0))
    assert 0 < rank0.log["BacktrackIters"] < 10
    assert 0.5 < rank0.log["KL"] <= 1.0


@BOTH
def test_trpo_keeps_the_policy_if_no_step_is_good(spec, monkeypatch):
    rank0 = Rank0(spec, algo="trpo")
    rule, before = rank0.policy.rule, rank0.policy.state()[0]
    outcome = rule.outcome

    def bad(*args):
        ratio, loss, kl = outcome(*args)
        return ratio, loss, kl + 1.0

    monkeypatch.setattr(rule, "outcome", bad)
    rank0.learn(rank0.batch(0))
    assert_same_state((before, {}), (rank0.policy.state()[0], {}))
    assert (rank0.log["BacktrackIters"], rank0.log["StepFrac"]) == (10, 0.0)
    assert rank0.log["KL"] == pytest.approx(0.0, abs=1e-7)


@ALGOS
def test_advantages_that_are_all_alike_are_no_reason_to_move(algo):
    rank0 = Rank0(BOX, algo=algo)
    obs, act, adv, _ = rank0.batch(0)
    rank0.policy.update(obs, act, np.full_like(adv, 3.0), rank0.log)
    assert rank0.log["KL"] == pytest.approx(0.0, abs=1e-6)


@BOTH
def test_policy_gradient_against_autograd(spec):
    rank0 = Rank0(spec, algo="vpg", epochs=1)
    obs, act, adv, _ = rank0.batch(0)
    net = rank0.policy.net
    flat = net.flat.clone().requires_grad_()
    dist = mean_kl(spec, torch.tensor(obs), None, flat, net)[1]
    loss = -(dist.log_prob(torch.tensor(act)) * torch.tensor((adv - adv.mean()) / adv.std())).mean()
    (expected,) = torch.autograd.grad(loss, flat)
    rank0.policy.update(obs, act, adv, rank0.log)
    torch.testing.assert_close(net.grad, expected, atol=1e-6, rtol=1e-4)
    assert rank0.log.keys() == {"KL", "Entropy", "LossPi"}


def test_clipped_surrogates_derivative_against_autograd():
    generator = torch.Generator().manual_seed(0)
    log_ratio = (0.4 * torch.randn(200, generator=generator)).requires_grad_()
    adv = torch.randn(200, generator=generator)
    ratio = log_ratio.exp()
    torch.minimum(ratio * adv, ratio.clamp(0.8, 1.2) * adv).mean().neg().backward()
    with torch.no_grad():
        d_logp = Rank0(BOX, algo="ppo", clip=0.2).policy.rule._d_logp(ratio.clone(), adv, len(adv))
    assert 0 < (d_logp == 0).sum() < 150
    torch.testing.assert_close(d_logp, log_ratio.grad)


def kl_after_update(change_rule=lambda rule: None, **settings):
    rank0 = Rank0(BOX, algo="ppo-kl", **{"lr": 3e-3, "epochs": 20, "kl_targ": 0.01, **settings})
    change_rule(rank0.policy.rule)
    rank0.learn(rank0.batch(0))
    return rank0.log["KL"]


def test_kl_penalty_holds_the_policy_back():
    weak, strong = (kl_after_update(lambda rule, beta=beta: vars(rule).update(beta=beta)) for beta in (0.0, 35.0))
    assert strong < 0.5 * weak


def test_hinge_holds_the_policy_back_beyond_twice_the_target():
    none, steep = (
        kl_after_update(lambda rule, hinge=hinge: vars(rule).update(beta=0.0, HINGE=hinge), lr=1e-3, epochs=60)
        for hinge in (0.0, 5000.0)
    )
    assert 0.02 < steep < 0.03 < none


def test_step_size_factor_multiplies_the_step_size():
    half = kl_after_update(lambda rule: vars(rule).update(lr_mult=0.5))
    assert half == kl_after_update(lr=1.5e-3) != kl_after_update()


@ALGOS
def test_unit_of_the_advantages_does_not_matter(algo):
    one, other = Rank0(BOX, algo=algo), Rank0(BOX, algo=algo)
    obs, act, adv, _ = one.batch(0)
    one.policy.update(obs, act, adv, one.log)
    other.policy.update(obs, act, 100.0 * adv + 7.0, other.log)
    assert one.log == pytest.approx(other.log, rel=1e-3, abs=1e-5)


def test_every_update_of_every_learner_has_its_own_stream():
    draws = [stream(*key).integers(1 << 60) for key in ((0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0))]
    assert len(set(draws)) == 4
    assert stream(0, 0, 1).integers(1 << 60) == draws[1]


def test_minibatches_are_dealt_out_without_remainder():
    rows, sizes = zip(*shuffled(np.random.default_rng(0), Part.whole(103), 10, "cpu"))
    assert [len(r) for r in rows] == list(sizes) == 3 * [11] + 7 * [10]
    assert sorted(torch.cat(rows).tolist()) == list(range(103))
    assert n_minibatches(Hyper(minibatches=4, minibatch_rows=10), 103) == 4
    assert n_minibatches(Hyper(minibatches=0, minibatch_rows=10), 103) == 10
    assert n_minibatches(Hyper(minibatches=32, minibatch_rows=10), 3) == 3
    assert n_minibatches(Hyper(minibatches=0, minibatch_rows=10), 3) == 1


@pytest.mark.parametrize("available, rows, expected", [(8, 100, 1), (8, 100_000, 8), (1, 100_000, 1)])
def test_threads_follow_the_works_size_and_are_restored(available, rows, expected):
    before = torch.get_num_threads()
    with torch_threads(n_threads(available, rows, 30_000)):
        assert torch.get_num_threads() == expected
    assert torch.get_num_threads() == before


def test_network_gradient_against_autograd():
    params = init_params(BOX, np.random.default_rng(0))
    net = Net(BOX, "policy", params, "cpu")
    rng = np.random.default_rng(1)
    x = torch.tensor(rng.standard_normal((40, 11), dtype=np.float32))
    grad_out = torch.tensor(rng.standard_normal((40, 3), dtype=np.float32))
    leaves = {key: torch.tensor(array, requires_grad=True) for key, array in params.items() if "policy" in key}
    out = x
    for i in range(3):
        out = out @ leaves[f"policy/{i}/weight"] + leaves[f"policy/{i}/bias"]
        out = out.tanh() if i < 2 else out
    (out * grad_out).sum().backward()
    with torch.no_grad():
        torch.testing.assert_close(net.forward(x), out.detach(), atol=1e-6, rtol=0)
        net.backward(grad_out)
    for key, leaf in leaves.items():
        if key != "policy/log_std":
            torch.testing.assert_close(net.grads[key], leaf.grad, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("length", [0.1, 100.0], ids=["short gradients", "long gradients"])
def test_adam_against_torch(length):
    net = Net(BOX, "policy", init_params(BOX, np.random.default_rng(0)), "cpu")
    adam = Adam(net, Hyper(max_grad_norm=0.5, log_std_lr=6.0))
    leaves = {key: view.clone().requires_grad_() for key, view in net.views.items()}
    log_std = leaves["policy/log_std"]
    others = [leaf for leaf in leaves.values() if leaf is not log_std]
    reference = torch.optim.Adam([{"params": others}, {"params": [log_std], "lr": 6e-3}], lr=1e-3)
    generator = torch.Generator().manual_seed(0)
    for i in range(5):
        net.grad.copy_(torch.randn(net.grad.shape, generator=generator))
        net.grad.mul_(length * (i + 1) / net.grad.norm())
        for key, leaf in leaves.items():
            leaf.grad = net.grads[key].clone()
        torch.nn.utils.clip_grad_norm_(leaves.values(), 0.5)
        reference.step()
        adam.step(1e-3)
        for key, leaf in leaves.items():
            torch.testing.assert_close(net.views[key], leaf.detach(), atol=1e-6, rtol=0)


def autograd_distribution(discrete, outputs, log_std):
    if discrete:
        return torch.distributions.Categorical(logits=outputs)
    return torch.distributions.Independent(torch.distributions.Normal(outputs, log_std.exp()), 1)


@pytest.mark.parametrize("discrete", [False, True], ids=["gaussian", "categorical"])
def test_distribution_and_its_derivatives_against_autograd(discrete):
    generator = torch.Generator().manual_seed(0)
    old_out, new_out = torch.randn(2, 40, 3, generator=generator)
    old_log_std, new_log_std = 0.5 * torch.randn(2, 3, generator=generator)
    weight = torch.randn(40, generator=generator)
    act = torch.randint(3, (40,), generator=generator) if discrete else torch.randn(40, 3, generator=generator)

    new_out.requires_grad_()
    new_log_std.requires_grad_()
    new = autograd_distribution(discrete, new_out, new_log_std)
    kl = torch.distributions.kl_divergence(autograd_distribution(discrete, old_out, old_log_std), new).mean()
    loss = (weight * new.log_prob(act)).sum() + 0.7 * kl - 0.3 * new.entropy().mean()
    loss.backward()

    log_std, log_std_grad = old_log_std.clone(), torch.zeros(3)
    dist = Categorical() if discrete else Gaussian(log_std, log_std_grad)
    with torch.no_grad():
        dist.set(old_out)
        old = dist.freeze()
        log_std.copy_(new_log_std)
        dist.set(new_out)
        torch.testing.assert_close(dist.logp(act), new.log_prob(act))
        torch.testing.assert_close(dist.entropy(), new.entropy().mean())
        torch.testing.assert_close(dist.kl(old), kl)
        grad = dist.backward(weight, 0.7, -0.3, old)
    torch.testing.assert_close(grad, new_out.grad, atol=1e-5, rtol=1e-5)
    if not discrete:
        torch.testing.assert_close(log_std_grad, new_log_std.grad, atol=1e-5, rtol=1e-5)


@ALGOS
def test_side_by_side_gives_the_bits_of_one_after_the_other(algo):
    rng = np.random.default_rng(3)
    batch = [
        rng.standard_normal(shape).astype(np.float32) for shape in [(300, BOX.obs_dim), (300, BOX.act_dim), 300, 300]
    ]
    results = []
    for threads in (1, 2):  # with one core to use they run one after the other
        params = init_params(BOX, np.random.default_rng(0))
        made = (BOX, params, Hyper(algo=algo), threads)
        learners = SideBySide(Policy(*made), ValueFunction(*made))
        logs = [learners.learn(*batch) for _ in range(3)]
        learners.policy.weights(params)
        learners.val_func.weights(params)
        results.append((logs, {name: array.tobytes() for name, array in params.items()}))
    assert results[0] == results[1]


def test_side_by_side_raises_what_either_raises():
    made = (BOX, init_params(BOX, np.random.default_rng(0)), Hyper(), 2)
    learners = SideBySide(Policy(*made), ValueFunction(*made))
    batch = [np.ones(shape, np.float32) for shape in [(30, BOX.obs_dim), (30, BOX.act_dim), 30, 30]]
    for broken in (2, 3):
        bad = list(batch)
        bad[broken] = np.full(30, np.nan, np.float32)
        with pytest.raises(FloatingPointError):
            learners.learn(*bad)
