"""Networks of the user's own, in torch: actor and learners have the same one, it learns, resumes, or is refused."""

import sys
from dataclasses import replace

import numpy as np
import pytest
from learning import ALGOS, BOTH, BOX, DISCRETE, a_batch, assert_same_bits, outputs

torch = pytest.importorskip("torch")
from policies import torch as backend  # noqa: E402
from policies.hyper import Hyper  # noqa: E402
from policies.learners import Learners  # noqa: E402
from policies.torch import modules  # noqa: E402


class Features(torch.nn.Module):
    """Random features, which are a buffer, and a module whose parameter is in none of torch's layers."""

    def __init__(self, obs_dim, outputs):
        super().__init__()
        self.register_buffer("features", torch.randn(obs_dim, 32))
        self.body = torch.nn.Sequential(
            torch.nn.Linear(32, 16), torch.nn.Tanh(), torch.nn.Dropout(), torch.nn.LayerNorm(16)
        )
        self.last = torch.nn.Parameter(0.1 * torch.randn(16, outputs))

    def forward(self, obs):
        return self.body(torch.tanh(obs @ self.features)) @ self.last


def features(name, obs_dim, outputs):
    return Features(obs_dim, outputs)


def learners(spec, algo, seed=0):
    """(Learners, Actor) with new parameters, torch's random numbers being elsewhere each time."""
    torch.manual_seed(np.random.default_rng().integers(2**31))
    params = modules.init_params(spec, np.random.default_rng(seed))
    hyper = Hyper.of(algo, minibatch_rows=32, epochs=4, vf_epochs=4, ent_coef=0.01)
    return Learners(backend, spec, params, hyper), modules.Actor(spec, params)


@BOTH
@ALGOS
def test_actor_and_learners_have_the_same_network_and_go_on(algo, spec):
    spec = replace(spec, network=f"{__name__}:features")
    ours, actor = learners(spec, algo)
    other, other_actor = learners(spec, algo, seed=1)
    assert (actor.params["policy/last"] != other_actor.params["policy/last"]).any()
    for seed in range(2):
        obs, act, adv, ret = batch = a_batch(spec, seed)
        old_logp = actor.logp(obs, act)
        log = ours.learn(*batch)
        for name, array in ours.params.items():
            actor.params[name][...] = array
        actor.refresh()
        ratio = np.exp(actor.logp(obs, act) - old_logp)
        assert log["LossPi"] == pytest.approx(-(ratio * (adv - adv.mean()) / adv.std()).mean(), abs=1e-4)
        assert log["LossV"] == pytest.approx(np.square(actor.value(obs) - ret).mean(), rel=1e-3)
        assert 0.0 < log["KL"] < 0.5
    other.load_state(*ours.state())
    assert ours.learn(*a_batch(spec, 2)) == other.learn(*a_batch(spec, 2))
    assert_same_bits([ours.state(), other.state()])


@BOTH
def test_a_row_does_not_depend_on_other_rows(spec):
    _, actor = learners(replace(spec, network=f"{__name__}:features"), "ppo")
    obs, *_ = a_batch(spec, 0, 20)
    forward = [actor.output(row).copy() for row in obs]
    backward = [actor.output(row).copy() for row in obs[::-1]][::-1]
    np.testing.assert_array_equal(forward, backward)
    np.testing.assert_allclose(forward, outputs(actor, obs), atol=1e-5)


@pytest.mark.parametrize("code, line", [
    ("def f(:", "SyntaxError: .*invalid syntax"),
    ("raise RuntimeError('no gpu')", "RuntimeError: no gpu; write MODULE:FUNCTION"),
    ("import sys; sys.exit('bye')", "SystemExit: bye"),
    ("def f(*a): raise SystemExit(3)", "the policy network: SystemExit: 3"),
    ("import torch\ndef f(n, i, o): return torch.nn.AdaptiveAvgPool1d(o)", "the policy .* has no parameters"),
])  # fmt: skip
def test_a_module_that_fails_is_refused_in_one_line(tmp_path, monkeypatch, code, line):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "user_network_that_fails.py").write_text(code)
    monkeypatch.delitem(sys.modules, "user_network_that_fails", raising=False)
    with pytest.raises(ValueError, match=f"^--network user_network_that_fails:f: {line}"):
        modules.build(replace(BOX, network="user_network_that_fails:f"), "policy")
    monkeypatch.delitem(sys.modules, "user_network_that_fails", raising=False)


SOURCE = """
import numpy as np, torch
from torch import nn

class Net(nn.Module):
    def __init__(self, forward, inputs, outputs, **parts):
        super().__init__()
        self.how, self.body = forward, nn.Sequential(nn.Linear(inputs, 8), nn.Tanh(), nn.Linear(8, outputs))
        for name, part in parts.items():
            setattr(self, name, part)
    def forward(self, obs):
        return self.how(self, obs)

def buffered(forward, i, o, values):
    module = Net(forward, i, o)
    module.register_buffer("kept", values)
    return module
def counted(self, obs):
    self.kept += 1e-9 * len(obs)
    return self.body(obs) * (1 + self.kept)

def frozen(n, i, o):
    module = Net(lambda self, obs: self.body(obs), i, o)
    module.body[0].weight.requires_grad_(False)
    return module
def complex_part(n, i, o):
    return Net(lambda self, obs: self.body(obs) + self.c.abs(), i, o, c=nn.Parameter(torch.ones(1, dtype=torch.cfloat)))
def deviations(n, i, o):
    return Net(lambda self, obs: self.body(obs) + self.log_std, i, o, log_std=nn.Parameter(torch.zeros(o)))
def recurrent(n, i, o):  # takes the rows for steps in time
    return Net(lambda self, obs: self.last(self.lstm(obs)[0]), i, o, lstm=nn.LSTM(i, 8), last=nn.Linear(8, o))
def no_number(n, i, o): return Net(lambda self, obs: self.body(obs) * float("nan"), i, o)
def in_place(n, i, o): return Net(lambda self, obs: self.body(obs.mul_(2)), i, o)
def other_random(n, i, o):
    values = torch.from_numpy(np.random.randn(i).astype("f4"))
    return buffered(lambda self, obs: self.body(obs * self.kept), i, o, values)
def counter(n, i, o): return buffered(counted, i, o, torch.zeros(()))

trunk = nn.Linear(4, 8)
def lazy(n, i, o): return nn.Sequential(nn.LazyLinear(8), nn.Tanh(), nn.LazyLinear(o))
def shared(n, i, o): return nn.Sequential(trunk, nn.Tanh(), nn.Linear(8, o))
"""


@pytest.fixture
def odd(tmp_path, monkeypatch):
    """Spec of a user's network, by the name of its function in SOURCE."""
    (tmp_path / "odd_networks.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "odd_networks", raising=False)
    return lambda name, spec=BOX: replace(spec, network=f"odd_networks:{name}")


@pytest.mark.parametrize("name, line", [
    ("frozen", r"its body.0.weight requires no gradient"),
    ("complex_part", r"its c requires no gradient, or is no real number"),
    ("deviations", r"its parameter log_std has the name of the policy's own"),
    ("recurrent", r"must depend on its own row alone"),
    ("no_number", r"its output is not finite"),
    ("in_place", r"or it changes the rows"),
    ("other_random", r"its kept differs when the network is made again"),
    ("counter", r"its kept differs when the network is made again or used"),
])  # fmt: skip
def test_a_network_that_no_learner_can_use_is_refused(odd, name, line):
    with pytest.raises(ValueError, match=f"^--network odd_networks:{name}: the policy network: ValueError: .*{line}"):
        modules.build(odd(name), "policy")


def test_a_network_for_discrete_actions_may_have_a_log_std(odd):
    modules.build(odd("deviations", DISCRETE), "policy")


def test_lazy_layers_depend_on_the_seed_alone(odd):
    made = [modules.init_params(odd("lazy"), np.random.default_rng(0)) for _ in range(2)]
    assert_same_bits([(params, {}) for params in made])


def test_modules_that_a_function_shares_are_parted(odd):
    policy, value = (
        dict(modules.build(odd("shared", DISCRETE), net).named_parameters()) for net in ("policy", "value")
    )
    assert policy["0.weight"].data_ptr() != value["0.weight"].data_ptr()
