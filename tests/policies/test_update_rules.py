"""The update rules: where they stop, what they adapt, and that a step of TRPO stays within its bound."""

import numpy as np
import pytest
from learning import BACKENDS, BOTH, BOX, Rank0, a_batch, assert_same_bits, entropy

from policies.backend import as_array
from policies.data_parallel import Part
from policies.rules import conjugate_gradients


def test_ppo_stops_at_the_target_divergence():
    settings = {"algo": "ppo", "lr": 3e-3, "epochs": 50}
    log = Rank0("numpy", BOX, kl_targ=0.02, **settings).learn(a_batch(BOX, 0))
    assert 1 < log["StopIter"] < 50
    assert log["KL"] > 0.02
    settings["epochs"] = int(log["StopIter"]) - 1
    for kl_targ in (0.02, 0.0):  # 0: never
        log = Rank0("numpy", BOX, kl_targ=kl_targ, **settings).learn(a_batch(BOX, 0))
        assert log["KL"] <= 0.02 and log["StopIter"] == settings["epochs"]
    settings["epochs"] = 50
    assert Rank0("numpy", BOX, kl_targ=0.0, **settings).learn(a_batch(BOX, 0))["StopIter"] == 50


@BACKENDS
def test_without_a_step_size_ppo_makes_no_pass(backend):
    rank0 = Rank0(backend, BOX, "ppo")
    before = rank0.policy.state()[0]
    rank0.policy.lr_scale = 0.0
    log = rank0.learn(a_batch(BOX, 0))
    after = rank0.policy.state()[0]
    assert (log["StopIter"], log["KL"], log["ClipFrac"]) == (0.0, 0.0, 0.0) and log["LossV"] > 0.0
    assert all(np.array_equal(before[name], after[name]) for name in before)


@BACKENDS
def test_share_of_rows_beyond_the_clip_range(backend):
    rank0 = Rank0(backend, BOX, "ppo", lr=1e-2, kl_targ=0.0)
    obs, act, *_ = batch = a_batch(BOX, 0)
    before = rank0.actor.logp(obs, act)
    rank0.update(*batch)
    ratio = np.exp(rank0.actor.logp(obs, act) - before)
    assert rank0.log["ClipFrac"] == pytest.approx((np.abs(ratio - 1.0) > 0.2).mean(), abs=1e-6) != 0.0


def test_ppo_kl_adapts_its_penalty_and_stops_early():
    rank0 = Rank0("numpy", BOX, "ppo-kl", lr=0.1, epochs=50)
    rank0.learn(a_batch(BOX, 0))
    assert rank0.log["KL"] > 4 * 0.003
    assert rank0.log["StopIter"] < 50
    assert (rank0.log["Beta"], rank0.log["LrMult"]) == (1.0, 1.0)
    rule = rank0.policy
    assert rule.beta == 1.5
    for _ in range(20):
        rule.adapt(1.0)
    assert rule.beta == 35.0
    assert 0.05 < rule.lr_mult < 0.1
    for _ in range(40):
        rule.adapt(0.0)
    assert rule.beta == pytest.approx(1 / 35)
    assert 10.0 < rule.lr_mult < 15.0


def kl_after_update(change_rule=lambda rule: None, **settings):
    rank0 = Rank0("numpy", BOX, "ppo-kl", **{"lr": 3e-3, "epochs": 20, "kl_targ": 0.01, **settings})
    change_rule(rank0.policy)
    return rank0.learn(rank0.batch(0))["KL"]


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


def test_vpg_logs_nothing_of_its_own():
    rank0 = Rank0("numpy", BOX, "vpg", epochs=1)
    rank0.update(*a_batch(BOX, 0))
    assert rank0.log.keys() == {"KL", "Entropy", "LossPi"}
    assert rank0.policy.net.steps == 1


def fisher(backend, spec, **settings):
    """(Rank0 after an update, function that multiplies by its damped Fisher matrix on the next batch)."""
    rank0 = Rank0(backend, spec, "trpo", **settings)
    rank0.learn(a_batch(spec, 0))
    batch = rank0.policy.batch(*a_batch(spec, 1)[:3], Part.whole(150))
    return rank0, rank0.policy.fisher(batch)


@BOTH
def test_conjugate_gradients_against_a_dense_solve(spec):
    rank0, product = fisher("numpy", spec, cg_damping=0.1)
    size = rank0.policy.net.n_params
    b = np.random.default_rng(0).standard_normal(size)
    dense = np.stack([product(unit) for unit in np.eye(size)])
    np.testing.assert_allclose(dense, dense.T, atol=1e-5, rtol=1e-4)
    assert np.linalg.eigvalsh(dense).min() > 0.0999
    x, left = conjugate_gradients(product, b, 50)
    np.testing.assert_allclose(x, np.linalg.solve(dense, b), atol=1e-3, rtol=1e-3)
    np.testing.assert_allclose(left, b - dense @ x, atol=1e-3, rtol=0)
    assert np.linalg.norm(left) < 1e-4 * np.linalg.norm(b)


def test_conjugate_gradients_end():
    x, left = conjugate_gradients(lambda vector: 2.0 * vector, np.zeros(3), 10)
    assert not x.any() and not left.any()
    b, products = np.array([1.0, 1.0]), []
    x, left = conjugate_gradients(lambda vector: products.append(vector) or 0.0 * vector, b, 10)  # no curvature
    assert not x.any() and (left == b).all() and len(products) == 1
    x, _ = conjugate_gradients(lambda vector: np.array([1.0, 4.0]) * vector, b, 10)
    np.testing.assert_allclose(x, [1.0, 0.25])


@BOTH
@BACKENDS
def test_trpo_stays_within_its_bound(backend, spec):
    rank0 = Rank0(backend, spec, "trpo", kl_targ=0.02, cg_damping=0.01)
    for seed in range(5):
        rank0.update(*rank0.batch(seed))
        assert 0.005 < rank0.log["KL"] <= 0.02
        assert rank0.log["LossPi"] < -0.02
        assert rank0.log["StepFrac"] == pytest.approx(0.8 ** rank0.log["BacktrackIters"])
        assert 0.0 <= rank0.log["CgResidual"] < 0.5
    assert rank0.policy.net.steps == 0


def test_trpo_goes_back_until_it_is_within_its_bound():
    rank0 = Rank0("numpy", BOX, "trpo", kl_targ=1.0, cg_damping=0.0)  # where the quadratic model is far off
    rank0.update(*rank0.batch(0))
    assert 0 < rank0.log["BacktrackIters"] < 10
    assert 0.5 < rank0.log["KL"] <= 1.0


@BOTH
@BACKENDS
def test_trpo_keeps_the_policy_if_no_step_is_good(backend, spec, monkeypatch):
    rank0 = Rank0(backend, spec, "trpo")
    before, compare = rank0.policy.state(), rank0.policy.compare

    def bad(batch):
        moved = (rank0.policy.net.vector() != start).any()
        now = compare(batch)
        return now._replace(kl=now.kl + 1.0) if moved else now

    start = rank0.policy.net.vector()
    monkeypatch.setattr(rank0.policy, "compare", bad)
    rank0.update(*a_batch(spec, 0))
    assert_same_bits([(before[0], {}), (rank0.policy.state()[0], {})])
    assert (rank0.log["BacktrackIters"], rank0.log["StepFrac"]) == (10, 0.0)
    assert rank0.log["KL"] == pytest.approx(0.0, abs=1e-7)


@BACKENDS
def test_entropys_bonus_counts_in_search_and_gradient(backend):
    """Where the advantages say nothing, a bonus alone widens the policy."""
    rank0 = Rank0(backend, BOX, "trpo", ent_coef=0.01)
    obs, act, adv, _ = a_batch(BOX, 0)
    before = entropy(rank0.actor, obs).mean()
    rank0.update(obs, act, np.full_like(adv, 3.0))
    assert rank0.log["StepFrac"] == 1.0
    assert rank0.log["Entropy"] > before + 0.01
    assert as_array(rank0.policy.net.vector()).dtype == np.float32
