"""The policy and value networks in NumPy float32: what every rank runs, with no deep learning framework.

Tanh hidden layers and a linear output; a diagonal Gaussian with state-independent deviations for Box actions, a
categorical distribution for Discrete ones. Parameters are a flat dict of float32 arrays with framework-neutral names:

=====================  ====================  =====================================================
name                   shape                 meaning
=====================  ====================  =====================================================
``policy/0/weight``    (inputs, outputs)     weight of the first layer; ``y = x @ weight + bias``
``policy/0/bias``      (outputs,)            its bias
``policy/log_std``     (act_dim,)            log of the standard deviation of each action (Box only)
``value/0/weight``     (inputs, outputs)     the same for the value network, which has one output
=====================  ====================  =====================================================
"""

import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

INIT_LOG_STD = -0.5
HIDDEN_GAIN = math.sqrt(2.0)
POLICY_OUT_GAIN = 0.01  # first actions near the middle of their range, first categorical choices near uniform
VALUE_OUT_GAIN = 1.0
LOG_2PI = math.log(2.0 * math.pi)


@dataclass(frozen=True)
class Spec:
    """Sizes of a policy and its value function.

    Attributes:
        obs_dim: length of one flat observation.
        act_dim: components of a Box action, or the number of Discrete actions.
        discrete: True for Discrete actions.
        policy_hid: width of each hidden layer of the policy, first to last.
        valfunc_hid: the same for the value function.
    """

    obs_dim: int
    act_dim: int
    discrete: bool
    policy_hid: tuple[int, ...]
    valfunc_hid: tuple[int, ...]

    @classmethod
    def from_dict(cls, fields):
        """The Spec from what `to_dict` returned, with tuples where JSON made lists."""
        return cls(**{**fields, "policy_hid": tuple(fields["policy_hid"]), "valfunc_hid": tuple(fields["valfunc_hid"])})

    def to_dict(self) -> dict[str, Any]:
        """A dict that JSON can store."""
        return asdict(self)

    def sizes(self, net):
        """Layer widths of one network, input and output included.

        Args:
            net: "policy" or "value".

        Returns:
            tuple of int, such as (376, 64, 64, 17).
        """
        if net == "policy":
            return (self.obs_dim, *self.policy_hid, self.act_dim)
        return (self.obs_dim, *self.valfunc_hid, 1)

    def shapes(self, net):
        """Names and shapes of one network's parameters, in the order of a flat vector of all of them.

        Weights come first, so that they start on whole cache lines when the widths are multiples of 16.

        Args:
            net: "policy" or "value".

        Returns:
            dict of str to tuple of int.
        """
        layers = list(enumerate(zip(self.sizes(net), self.sizes(net)[1:])))
        shapes = {f"{net}/{i}/weight": pair for i, pair in layers}
        shapes |= {f"{net}/{i}/bias": pair[1:] for i, pair in layers}
        if net == "policy" and not self.discrete:
            shapes["policy/log_std"] = (self.act_dim,)
        return shapes


def parse_hid_list(text, obs_dim, act_dim, kind):
    """Hidden layer widths from the command line; the string is parsed, never evaluated.

    Args:
        text: "64,64" or "[64, 64]", or "auto" for Patrick Coady's sizing (github.com/pat-coady/trpo): three layers,
            the first 10 times the observation, the last 10 times the action (value function: 5), the middle one their
            geometric mean.
        obs_dim: length of one observation.
        act_dim: components of an action.
        kind: "policy" or "value".

    Returns:
        tuple of int.

    Raises:
        ValueError: the string is neither a list of positive integers nor "auto"; one line.
    """
    if text.strip() == "auto":
        first = obs_dim * 10
        last = act_dim * 10 if kind == "policy" else 5
        return (first, int(math.sqrt(first * last)), last)
    body = text.strip()
    if body.startswith("[") and body.endswith("]"):
        body = body[1:-1]
    widths = tuple(int(word) if word.strip().isdecimal() else 0 for word in body.split(","))
    if not all(widths):
        raise ValueError(
            f"hidden layers of the {kind} network: {text!r}; expected positive integers such as 64,64 or the word auto"
        )
    return widths


def init_params(spec, rng, log_std=INIT_LOG_STD):
    """Initial parameters, orthogonal weights and zero biases, from which the learners and every actor start.

    Args:
        spec: the Spec.
        rng: numpy.random.Generator to draw from.
        log_std: initial value of every ``policy/log_std``.

    Returns:
        dict of str to float32 array: the table in the module's docstring.
    """
    params = {}
    for net, out_gain in (("policy", POLICY_OUT_GAIN), ("value", VALUE_OUT_GAIN)):
        last = len(spec.sizes(net)) - 2
        for name, shape in spec.shapes(net).items():
            if name.endswith("/weight"):
                gain = out_gain if name == f"{net}/{last}/weight" else HIDDEN_GAIN
                params[name] = _orthogonal(rng, shape, gain)
            else:
                params[name] = np.full(shape, log_std if name == "policy/log_std" else 0.0, np.float32)
    return params


def _orthogonal(rng, shape, gain):
    """A float32 matrix with orthogonal rows or columns, scaled by `gain` (Saxe et al. 2014, arXiv:1312.6120)."""
    tall = rng.standard_normal((max(shape), min(shape)))
    q, r = np.linalg.qr(tall)
    q *= np.sign(np.diag(r))  # makes the draw uniform over the orthogonal matrices
    return np.ascontiguousarray(gain * (q if shape[0] >= shape[1] else q.T), dtype=np.float32)


def _layers(params, net):
    """(weight, bias, output buffer for one row) of each layer; the arrays themselves, which a broadcast overwrites."""
    layers = []
    while f"{net}/{len(layers)}/weight" in params:
        weight, bias = params[f"{net}/{len(layers)}/weight"], params[f"{net}/{len(layers)}/bias"]
        layers.append((weight, bias, np.empty(bias.shape, np.float32)))
    return layers


def _forward(layers, x):
    """Outputs of a network for a batch. Args: x: float32 (T, inputs). Returns: float32 (T, outputs)."""
    for weight, bias, _ in layers[:-1]:
        x = x @ weight
        x += bias
        np.tanh(x, out=x)
    weight, bias, _ = layers[-1]
    return x @ weight + bias


class Actor:
    """Policy and value function of one rank.

    `act` and `mode` multiply one row at once, so that its bits never depend on what else is being collected, on this
    rank or on another. The bits of the batched methods depend only on the rows and their number, as long as BLAS runs
    on one thread.

    Attributes:
        spec: the Spec.
        params: dict of str to float32 array. A broadcast overwrites the arrays in place; call `refresh` afterwards.
    """

    def __init__(self, spec, params):
        """Args: spec: the Spec. params: as `init_params` returns them; kept, not copied."""
        self.spec = spec
        self.params = params
        self._policy = _layers(params, "policy")
        self._value = _layers(params, "value")
        self._hidden, self._last = self._policy[:-1], self._policy[-1]
        self._std = None
        self.refresh()

    def refresh(self):
        """Recomputes what is derived from `params`; call it after a broadcast."""
        if not self.spec.discrete:
            self._std = np.exp(self.params["policy/log_std"])

    def noise(self, rng, n):
        """The random numbers of `n` calls of `act`, drawn at once.

        Args:
            rng: numpy.random.Generator.
            n: number of steps.

        Returns:
            Box: float32 (n, act_dim), standard normal. Discrete: float64 (n,), uniform on [0, 1).
        """
        if self.spec.discrete:
            return rng.random(n)
        return rng.standard_normal((n, self.spec.act_dim), dtype=np.float32)

    def act(self, obs, noise):
        """Draws one action.

        Args:
            obs: float32 (obs_dim,), scaled.
            noise: one row of `noise`.

        Returns:
            Box: a new float32 (act_dim,) array, mean + std * noise. Discrete: int, by the inverse of the cumulative
            probabilities at `noise`.
        """
        out = self._row(obs)
        if self.spec.discrete:
            cumulative = np.cumsum(np.exp(out - out.max()), dtype=np.float64)
            return min(int(cumulative.searchsorted(noise * cumulative[-1], side="right")), self.spec.act_dim - 1)
        action = self._std * noise
        action += out
        return action

    def mode(self, obs):
        """The most likely action for one row. Args: obs: float32 (obs_dim,), scaled. Returns: as `act`."""
        out = self._row(obs)
        return int(out.argmax()) if self.spec.discrete else out.copy()

    def _row(self, obs):
        """Policy outputs for one row: float32 (act_dim,), a buffer that the next call overwrites."""
        for weight, bias, out in self._hidden:
            obs.dot(weight, out)
            np.add(out, bias, out)
            np.tanh(out, out)
            obs = out
        weight, bias, out = self._last
        obs.dot(weight, out)
        return np.add(out, bias, out)

    def value(self, obs):
        """State values. Args: obs: float32 (T, obs_dim), scaled. Returns: float32 (T,)."""
        return _forward(self._value, obs)[:, 0]

    def mean(self, obs):
        """Means of the Gaussian. Args: obs: float32 (T, obs_dim), scaled. Returns: float32 (T, act_dim)."""
        return _forward(self._policy, obs)

    def probs(self, obs):
        """Probabilities of the actions. Args: obs: float32 (T, obs_dim), scaled. Returns: float32 (T, act_dim)."""
        return np.exp(self._log_probs(obs))

    def logp(self, obs, act):
        """Log-probability (Box: log-density) of actions that were taken.

        Args:
            obs: float32 (T, obs_dim), scaled.
            act: Box: float32 (T, act_dim). Discrete: integers (T,).

        Returns:
            float32 (T,).
        """
        if self.spec.discrete:
            return self._log_probs(obs)[np.arange(len(act)), act]
        log_std = self.params["policy/log_std"]
        z = (act - self.mean(obs)) / self._std
        return -0.5 * np.square(z).sum(axis=1) - log_std.sum() - np.float32(0.5 * self.spec.act_dim * LOG_2PI)

    def entropy(self, obs):
        """Entropy of the action distribution, in nats. Args: obs: float32 (T, obs_dim). Returns: float32 (T,)."""
        if self.spec.discrete:
            log_probs = self._log_probs(obs)
            return -(np.exp(log_probs) * log_probs).sum(axis=1)
        total = self.params["policy/log_std"].sum() + np.float32(0.5 * self.spec.act_dim * (1.0 + LOG_2PI))
        return np.full(len(obs), total, np.float32)

    def _log_probs(self, obs):
        """Logarithms of `probs`: float32 (T, act_dim)."""
        logits = _forward(self._policy, obs)
        logits -= logits.max(axis=1, keepdims=True)
        return logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
