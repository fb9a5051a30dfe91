"""The NumPy backend's derivatives, which are written out, against torch's autograd and distributions."""

import numpy as np
import pytest
from learning import BOTH, BOX, Rank0, a_batch, assert_same_bits

from policies import mlp
from policies.numpy.passes import Categorical, Gaussian, Worker


@pytest.fixture
def torch():
    """The library, where it is installed."""
    return pytest.importorskip("torch")


@BOTH
def test_network_and_its_derivatives_against_autograd(torch, spec):
    net = Rank0("numpy", spec).policy.net
    worker, rng = net.workers[0], np.random.default_rng(1)
    n_layers = len(spec.policy_hid) + 1
    for n in (40, 7, 60, 1):  # fewer and more rows than before
        x = rng.standard_normal((n, spec.obs_dim), dtype=np.float32)
        grad_out = rng.standard_normal((n, spec.act_dim), dtype=np.float32)
        leaves = {key: torch.tensor(view, requires_grad=True) for key, view in net.by_name(net.vector()).items()}

        def network(*parameters, x=x, keys=tuple(leaves)):
            named, out = dict(zip(keys, parameters)), torch.tensor(x)
            for i in range(n_layers):
                out = out @ named[f"policy/{i}/weight"] + named[f"policy/{i}/bias"]
                out = out.tanh() if i < n_layers - 1 else out
            return out

        out = network(*leaves.values())
        (out * torch.tensor(grad_out)).sum().backward()
        np.testing.assert_allclose(worker.forward(x, slice(None)), out.detach(), atol=1e-6)
        direction = rng.standard_normal(net.n_params).astype(np.float32)
        tangents = tuple(torch.tensor(view) for view in net.by_name(direction).values())
        expected = torch.func.jvp(network, tuple(leaf.detach() for leaf in leaves.values()), tangents)[1]
        np.testing.assert_allclose(worker.jvp(direction), expected, atol=1e-5, rtol=1e-5)
        worker.backward(grad_out)
        grads = net.by_name(worker.grad)
        for key, leaf in leaves.items():
            if key != "policy/log_std":
                np.testing.assert_allclose(grads[key], leaf.grad, atol=1e-5, rtol=1e-5, err_msg=key)


def autograd_distribution(of, outputs, log_std):
    """Args: of: torch.distributions. log_std: None: categorical."""
    if log_std is None:
        return of.Categorical(logits=outputs)
    return of.Independent(of.Normal(outputs, log_std.exp()), 1)


@pytest.mark.parametrize("discrete", [False, True], ids=["gaussian", "categorical"])
def test_distribution_and_its_derivatives_against_autograd(torch, discrete):
    def of_torch(out, log_std):
        return autograd_distribution(torch.distributions, out, None if discrete else log_std)

    generator = torch.Generator().manual_seed(0)
    old_out, new_out = torch.randn(2, 40, 3, generator=generator)
    old_log_std, new_log_std = 0.5 * torch.randn(2, 3, generator=generator)
    weight = torch.randn(40, generator=generator)
    act = torch.randint(3, (40,), generator=generator) if discrete else torch.randn(40, 3, generator=generator)

    new_out.requires_grad_()
    new_log_std.requires_grad_()
    new = of_torch(new_out, new_log_std)
    kl = torch.distributions.kl_divergence(of_torch(old_out, old_log_std), new).sum()
    loss = (weight * new.log_prob(act)).sum() + 0.7 * kl - 0.3 * new.entropy().sum()
    loss.backward()

    log_std, log_std_grad = old_log_std.numpy().copy(), np.zeros(3, np.float32)
    dist = Categorical() if discrete else Gaussian(log_std, log_std_grad)
    dist.set(old_out.numpy())
    old = dist.freeze()
    log_std[:] = new_log_std.detach()
    dist.set(new_out.detach().numpy())
    np.testing.assert_allclose(dist.logp(act.numpy()), new.log_prob(act).detach(), atol=1e-5, rtol=1e-5)
    assert dist.entropy() == pytest.approx(new.entropy().sum().item(), rel=1e-5)
    assert dist.kl(old) == pytest.approx(kl.item(), rel=1e-5)
    grad = dist.backward(weight.numpy(), 0.7, -0.3, old)
    np.testing.assert_allclose(grad, new_out.grad, atol=1e-5, rtol=1e-5)
    if not discrete:
        np.testing.assert_allclose(log_std_grad, new_log_std.grad, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("discrete", [False, True], ids=["gaussian", "categorical"])
def test_divergence_keeps_its_digits_where_it_is_small(torch, discrete):
    def of_torch(out, log_std):
        return autograd_distribution(torch.distributions, out, None if discrete else log_std)

    out = np.random.default_rng(0).standard_normal((40, 3)).astype(np.float32)
    log_std = np.full(3, -0.5, np.float32)
    dist = Categorical() if discrete else Gaussian(log_std, np.zeros(3, np.float32))
    dist.set(out)
    old = dist.freeze()
    dist.set(out + np.float32(2e-3) * np.eye(40, 3, dtype=np.float32)[:, ::-1])
    log_std += 1e-3
    if not discrete:
        dist.set(out)
    now = [torch.tensor(x, dtype=torch.float64) for x in (out, np.full(3, -0.5), log_std)]
    before = of_torch(now[0], now[1])
    shifted = now[0] + (2e-3 * torch.eye(40, 3).flip(1).double() if discrete else 0.0)
    expected = torch.distributions.kl_divergence(before, of_torch(shifted, now[2])).sum()
    assert dist.kl(old) == pytest.approx(expected.item(), rel=2e-2, abs=1e-6)


def test_arrays_are_made_once():
    rank0 = Rank0("numpy", BOX)
    net = rank0.policy.net
    x = np.ones((10, 6), np.float32)
    worker = net.workers[0]
    assert worker.forward(x, slice(10)).ctypes.data == worker.forward(x, slice(5)).ctypes.data
    made = (*net._vectors, worker.grad, *worker._all_outs)
    assert all(array.ctypes.data % 64 == 0 for array in made)


@BOTH
def test_threads_make_the_gradient_of_the_whole_batch(spec, monkeypatch):
    made = []
    for n_threads in (1, 3):
        monkeypatch.setattr("policies.backend.n_threads", lambda *_, n=n_threads: n)
        rank0 = Rank0("numpy", spec, threads=n_threads, algo="trpo", ent_coef=0.01)
        for seed in range(2):
            rank0.learn(a_batch(spec, seed))
        made.append(rank0.params)
    for name, array in made[0].items():
        np.testing.assert_allclose(made[1][name], array, atol=1e-4, err_msg=name)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("algo", ["ppo", "trpo"])
def test_a_part_that_overflows_raises_and_prints_nothing(algo, monkeypatch):
    monkeypatch.setattr("policies.backend.n_threads", lambda *_: 3)
    rank0 = Rank0("numpy", BOX, algo, threads=3)
    before, (obs, act, adv, ret) = rank0.state(), a_batch(BOX, 0)
    act[-1] = 1e25
    with pytest.raises(FloatingPointError, match=r"not finite|is nan|is inf"):
        rank0.policy.update(obs, act, adv)
    with pytest.raises(FloatingPointError, match=r"not finite|is nan|is inf"):
        rank0.value.fit(obs, ret * 1e30)
    assert_same_bits([rank0.state(), before])


def test_a_step_of_a_large_network_has_the_bits_of_its_parts(monkeypatch):
    made = []
    for most in (10**9, 50):
        monkeypatch.setattr("policies.numpy.nets.PARAMS_PER_THREAD", most)
        rank0 = Rank0("numpy", BOX, threads=2, log_std_lr=3.0)
        rank0.learn(a_batch(BOX, 0))
        made.append(rank0.policy.net.vector())
    assert made[0].tobytes() == made[1].tobytes()


@pytest.mark.parametrize("threads", [1, 2])
def test_one_minibatch_is_not_copied_and_no_pass_is_made_twice(monkeypatch, threads):
    monkeypatch.setattr("policies.backend.n_threads", lambda *_: threads)
    made, forward = [], mlp.forward
    monkeypatch.setattr(Worker, "_some", lambda *_: pytest.fail("rows were copied"))
    monkeypatch.setattr(mlp, "forward", lambda layers, x, outs: made.append(len(x)) or forward(layers, x, outs))
    rank0 = Rank0("numpy", BOX, threads=threads, minibatches=1, kl_targ=1e3)
    obs, act, adv, ret = a_batch(BOX, 0)
    rank0.policy.update(obs, act, adv)
    assert len(made) == threads * 5  # before the update, and after each of its four passes
    made.clear()
    rank0.value.fit(obs, ret)
    assert len(made) == threads * 5


def test_a_batch_in_the_memory_of_the_one_before_is_another():
    states = []
    for reused in (False, True):
        rank0 = Rank0("numpy", BOX, minibatches=1)
        memory = mlp.aligned(a_batch(BOX, 0)[0].shape)
        for seed in (0, 1):
            obs, *others = a_batch(BOX, seed)
            memory[:] = obs
            rank0.learners.learn(memory if reused else obs, *others)
        states.append(rank0.state())
    assert_same_bits(states)


@pytest.mark.parametrize("dtype", [np.float32, np.int64])
def test_a_batch_is_copied_to_whole_cache_lines(dtype):
    theirs = np.arange(40, dtype=np.float64).reshape(10, 4)[1::2, ::-1]
    ours = Rank0("numpy", BOX).policy.net.copied(theirs, dtype)
    np.testing.assert_array_equal(ours, theirs)
    assert ours.dtype == dtype and ours.flags.c_contiguous and ours.ctypes.data % 64 == 0
