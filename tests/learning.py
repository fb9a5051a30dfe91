"""What the tests of the learners have in common: backends, networks, batches, and learners that share a batch."""

import functools
import importlib.util
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from policies.actor import Actor, Spec, init_params
from policies.data_parallel import ALONE, Part
from policies.hyper import DEFAULTS, Hyper
from policies.learners import Learners

BOX = Spec(obs_dim=6, act_dim=3, discrete=False, policy_hid=(16, 8), valfunc_hid=(12,))
DISCRETE = Spec(obs_dim=4, act_dim=5, discrete=True, policy_hid=(16,), valfunc_hid=(8, 8))
EACH = ["numpy", pytest.param("torch", marks=pytest.mark.torch), pytest.param("tf", marks=pytest.mark.tensorflow)]
FIELDS = ("obs", "act", "adv", "ret")
N = 150
COMPILED = ("clip", "ent_coef", "max_grad_norm", "log_std_lr", "minibatch_rows")  # settings that TensorFlow compiles
TIMEOUT_S = 20  # a learner that another left behind in a sum gives up after so long

BACKENDS = pytest.mark.parametrize("backend", EACH)
BOTH = pytest.mark.parametrize("spec", [BOX, DISCRETE], ids=["box", "discrete"])
ALGOS = pytest.mark.parametrize("algo", sorted(DEFAULTS))


def module(backend):
    """The package of a backend."""
    return importlib.import_module(f"policies.{backend}")


class Rank0:
    """Learners of one backend in their first state, and the actor that has their weights.

    Their networks are those of an earlier test, because TensorFlow compiles what each of them computes. A test that has
    several at once numbers them.

    `params` are the actor's, `log` is that of the last update.
    """

    def __init__(self, backend, spec, algo="ppo", number=0, threads=1, share=ALONE, **settings):
        self.spec = spec
        self.params = init_params(spec, np.random.default_rng(0))
        self.actor = Actor(spec, self.params)
        hyper = Hyper.of(algo, **{"minibatch_rows": 32, "epochs": 4, "vf_epochs": 4, **settings})
        used = SimpleNamespace(
            PolicyNet=functools.partial(used_net, backend, "PolicyNet", number),
            ValueNet=functools.partial(used_net, backend, "ValueNet", number),
        )
        self.learners = Learners(used, spec, self.params, hyper, threads, "cpu", share)
        self.policy, self.value, self.state = self.learners.policy, self.learners.value, self.learners.state
        self.log = {}

    def batch(self, seed, n=N):
        """[obs, act, adv, ret], with actions as the actor draws them; it favours a known action in every state."""
        rng = np.random.default_rng(seed)
        obs = rng.standard_normal((n, self.spec.obs_dim), dtype=np.float32)
        act = np.array([draw(self.actor, row, z) for row, z in zip(obs, self.actor.noise(rng, n))])
        return [obs, act, *gains(self.spec, obs, act)]

    def update(self, obs, act, adv, ret=None, logp=None):
        """The policy's update alone."""
        self.log = self.policy.update(obs, act, adv, logp=logp)
        self.export()

    def learn(self, batch, part=None, logp=None):
        """Both updates. Returns: what they log."""
        self.log = self.learners.learn(*batch, part, logp)
        self.export()
        return self.log

    def export(self):
        """Gives the actor the learners' weights."""
        for name, array in self.learners.params.items():
            self.params[name][...] = array
        self.actor.refresh()

    def load_state(self, state):
        """Takes over what `state` returned."""
        self.learners.load_state(*state)
        self.export()


def draw(actor, obs, noise):
    """An action. Args: obs: one row. noise: one row of what `Actor.noise` returned."""
    return actor.sample(actor.output(obs), noise)


def outputs(actor, obs):
    """Means or logits for a batch, as `Actor.logp` computes them."""
    return actor._forward("policy", obs)


def probs(actor, obs):
    """Probabilities of Discrete actions."""
    exps = np.exp(outputs(actor, obs).astype(np.float64))
    return exps / exps.sum(axis=1, keepdims=True)


def entropy(actor, obs):
    """Entropy of the action distribution for each row of a batch, nats."""
    if actor.spec.discrete:
        return -(probs(actor, obs) * np.log(probs(actor, obs))).sum(axis=1)
    return np.full(len(obs), (actor.params["policy/log_std"] + 0.5 * np.log(2 * np.pi * np.e)).sum())


def used_net(backend, kind, number, spec, params, hyper, threads, device):
    """A network, with the settings that are not compiled, the parameters, and the optimizer as new."""
    if backend != "tf":
        return getattr(module(backend), kind)(spec, params, hyper, threads, device)
    compiled = replace(Hyper(), **{key: getattr(hyper, key) for key in COMPILED})
    net = _net(backend, kind, number, spec, compiled, device)
    net.hyper, net.threads = hyper, threads
    net.load(params)
    zeros = np.zeros(net.n_params, np.float32)
    net.steps = 0
    for which in (1, 2):
        net.set_vector(zeros, which)
    return net


@functools.cache
def _net(backend, kind, number, spec, hyper, device):
    return getattr(module(backend), kind)(spec, init_params(spec, np.random.default_rng(0)), hyper, 1, device)


def gains(spec, obs, act):
    """(adv, ret) of actions: float32 (n,) each."""
    gain = (act == 2) * 1.0 if spec.discrete else -np.square(act - 0.5).sum(axis=1)
    return gain.astype(np.float32), (0.5 * obs[:, 0] + 1.0).astype(np.float32)


def a_batch(spec, seed, n=N):
    """[obs, act, adv, ret], which depend on no policy."""
    rng = np.random.default_rng(seed)
    obs = rng.standard_normal((n, spec.obs_dim), dtype=np.float32)
    act = rng.integers(spec.act_dim, size=n) if spec.discrete else 0.6 * rng.standard_normal((n, spec.act_dim))
    adv, ret = gains(spec, obs, act)
    return [obs, act if spec.discrete else act.astype(np.float32), 3.0 * adv + 7.0, ret]


def assert_same_bits(states):
    """States of learners, (arrays, scalars), are all the same."""
    for arrays, scalars in states[1:]:
        assert scalars == states[0][1]
        assert arrays.keys() == states[0][0].keys()
        for key, array in arrays.items():
            assert array.tobytes() == states[0][0][key].tobytes(), key


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
    """See policies.data_parallel.LearnerGroup."""

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

    def __init__(self, backend, spec, n_learners=1, **settings):
        self.meeting = Meeting(n_learners)
        shares = [self.meeting.share(index) if n_learners > 1 else ALONE for index in range(n_learners)]
        numbers = range(1, 1 + n_learners) if n_learners > 1 else [0]
        self.learners = [Rank0(backend, spec, number=i, share=x, **settings) for i, x in zip(numbers, shares)]

    def together(self, call):
        """`call(learners, index)` of each in a thread of its own. Returns: results or exceptions, in order."""
        with ThreadPoolExecutor(len(self.learners)) as pool:
            futures = [pool.submit(call, learners, index) for index, learners in enumerate(self.learners)]
            return [future.exception() or future.result() for future in futures]

    def learn(self, batch, parts=(None,)):
        """One update on the rows of `parts`. Returns: what each logged, or raised."""

        def call(learners, index):
            part = parts[index]
            return learners.learn(batch if part is None else [array[part.rows] for array in batch], part)

        return self.together(call)

    def state(self):
        """The state of each."""
        return self.together(lambda learners, _: learners.state())

    def load_state(self, state):
        """Gives all the same state."""
        assert self.together(lambda learners, _: learners.load_state(state)) == [None] * len(self.learners)


def split(weights, seed, n=N):
    """Parts of a batch, as large as `weights` say, of rows from anywhere in it."""
    order = np.random.default_rng(seed).permutation(n)
    pieces = np.split(order, np.round(np.cumsum(weights)[:-1] * n).astype(int))
    return [Part(np.sort(rows), n) for rows in pieces]
