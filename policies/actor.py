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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from policies.mlp import Array, aligned, buffers, forward, layers

CNN = "cnn"  # Spec.network: a convolutional network for images, in torch
LEAST_IMAGE = 20  # its height and width at least
INIT_LOG_STD = -0.5
HIDDEN_GAIN = math.sqrt(2.0)
OUT_GAINS = {"policy": 0.01, "value": 1.0}  # first actions near the middle of their range, first choices near uniform
WIDE = 2**20  # weights of a policy from which on rows of several environments are multiplied together
HEIGHTS = (16, 8)  # ... in products of this number of rows; on some processors OpenBLAS makes 16 of blocks of 12 and 4
LOG_2PI = math.log(2.0 * math.pi)


def channels_last(image: tuple[int, ...]) -> bool:
    """Whether channels are the last dimension of an image's shape: the one unlike two equal ones, else the smaller."""
    first, middle, last = image
    return first == middle if (first == middle) != (middle == last) else last < first


@dataclass(frozen=True)
class Spec:
    """Sizes of a policy and its value function."""

    obs_dim: int  # length of one flat observation
    act_dim: int  # components of a Box action, or the number of Discrete actions
    discrete: bool  # True for Discrete actions
    policy_hid: tuple[int, ...]  # width of each hidden layer, first to last
    valfunc_hid: tuple[int, ...]
    network: str = ""  # module:function that makes other networks, in torch; CNN; "": the built-in ones
    image: tuple[int, ...] = ()  # for CNN: shape of the observations, images of uint8, channels first or last

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> "Spec | None":
        """The Spec from what dataclasses.asdict made of it, with tuples where JSON made lists; None: it is no such."""
        try:
            made: Any = {name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()}
            spec = cls(**made)
            sizes: tuple[Any, ...] = spec.obs_dim, spec.act_dim, *spec.policy_hid, *spec.valfunc_hid, *spec.image
            if all(type(n) is int and n > 0 for n in sizes) and bool(spec.image) == (spec.network == CNN):
                return spec
        except (TypeError, AttributeError):
            pass
        return None

    @property
    def obs_dtype(self) -> type:
        """Of observations as the environment gives them."""
        return np.uint8 if self.image else np.float32

    def sizes(self, net: str) -> tuple[int, ...]:
        """Layer widths of a network, input and output included: (376, 64, 64, 17). Args: net: "policy" or "value"."""
        if net == "policy":
            return (self.obs_dim, *self.policy_hid, self.act_dim)
        return (self.obs_dim, *self.valfunc_hid, 1)

    def shapes(self, net: str) -> dict[str, tuple[int, ...]]:
        """Names and shapes of one network's parameters, in the order of a flat vector of all of them. Args: as `sizes`.

        Weights come first, so that they start on whole cache lines when the widths are multiples of 16.
        """
        layers = list(enumerate(zip(self.sizes(net), self.sizes(net)[1:])))
        shapes: dict[str, tuple[int, ...]] = {f"{net}/{i}/weight": pair for i, pair in layers}
        shapes |= {f"{net}/{i}/bias": pair[1:] for i, pair in layers}
        if net == "policy" and not self.discrete:
            shapes["policy/log_std"] = (self.act_dim,)
        return shapes


def parse_hid_list(text: str, obs_dim: int, act_dim: int, kind: str) -> tuple[int, ...]:
    """Hidden layer widths from the command line; the string is parsed, never evaluated.

    Args:
        text: "64,64" or "[64, 64]", or "auto" for Patrick Coady's sizing (github.com/pat-coady/trpo): three layers,
            the first 10 times the observation, the last 10 times the action (value function: 5), the middle one their
            geometric mean.
        kind: "policy" or "value".
    Raises: ValueError: the string is neither a list of positive integers nor "auto"; one line.
    """
    body = text.strip()
    if body == "auto":
        first, last = obs_dim * 10, act_dim * 10 if kind == "policy" else 5
        return (first, int(math.sqrt(first * last)), last)
    if body.startswith("[") and body.endswith("]"):
        body = body[1:-1]
    if all(widths := tuple(int(word) if word.strip().isdecimal() else 0 for word in body.split(","))):
        return widths
    expected = "positive integers such as 64,64 or the word auto"
    raise ValueError(f"hidden layers of the {kind} network: {text!r}; expected {expected}")


def init_params(spec: Spec, rng: np.random.Generator, log_std: float = INIT_LOG_STD) -> dict[str, Array]:
    """Initial parameters, as in the module's table: orthogonal weights, zero biases, and every log_std as given."""
    params = {}
    for net, out_gain in OUT_GAINS.items():
        last = f"{net}/{len(spec.sizes(net)) - 2}/weight"
        for name, shape in spec.shapes(net).items():
            if name.endswith("/weight"):
                params[name] = _orthogonal(rng, shape, out_gain if name == last else HIDDEN_GAIN)
            else:
                params[name] = np.full(shape, log_std if name == "policy/log_std" else 0.0, np.float32)
    return params


def _orthogonal(rng: np.random.Generator, shape: tuple[int, ...], gain: float) -> Array:
    """A float32 matrix with orthogonal rows or columns, scaled by `gain` (Saxe et al. 2014, arXiv:1312.6120)."""
    tall = rng.standard_normal((max(shape), min(shape)))
    q, r = np.linalg.qr(tall)
    q *= np.sign(np.diag(r))  # makes the draw uniform over the orthogonal matrices
    return np.ascontiguousarray(gain * (q if shape[0] >= shape[1] else q.T), dtype=np.float32)


class Actor:
    """Policy and value function of one rank.

    `output` multiplies one row at once and `outputs` always the same number, so that a row's bits never depend on what
    else is being collected, on this rank or on another; those of `output` and `outputs` differ. The bits of the other
    batched methods depend only on the rows and their number, as long as BLAS runs on one thread. Observations are
    float32, scaled: (obs_dim,), or T of them as (T, obs_dim).
    """

    # Rows of a product of `outputs`, by which several environments are to be stepped together; 0: they are not. The
    # policy's size decides it, and how BLAS multiplies; never the number of environments or ranks.
    height = 0

    def __init__(self, spec: Spec, params: dict[str, Array]):
        """Args: params: as `init_params` returns them; kept, not copied."""
        self.spec, self.params = spec, params
        self._nets = {net: layers(params, net) for net in ("policy", "value")}
        self._row = buffers(self._nets["policy"])
        if sum(weight.size for weight, _ in self._nets["policy"]) >= WIDE:
            self.height = next(filter(self._places_agree, HEIGHTS), 0)
        self.refresh()

    def refresh(self) -> None:
        """Recomputes what is derived from `params`; call it after a broadcast."""
        if not self.spec.discrete:
            with np.errstate(over="ignore"):  # the first action that is not finite gets a line of its own
                self._std = np.exp(self.params["policy/log_std"])

    def noise(self, rng: np.random.Generator, n: int) -> Array:
        """For `n` calls of `sample`: float32 (n, act_dim), standard normal; or float64 (n,), uniform on [0, 1)."""
        if self.spec.discrete:
            return rng.random(n)
        return rng.standard_normal((n, self.spec.act_dim), dtype=np.float32)

    def output(self, obs: Array) -> Array:
        """Means or logits for one observation: float32 (act_dim,), which the next call overwrites."""
        return forward(self._nets["policy"], obs, self._row)

    def outputs(self, obs: Sequence[Array]) -> list[Array]:
        """`output` for any number of them, as new arrays: in products of one fixed height, filled up with zeros."""
        found: list[Array] = []
        for first in range(0, len(obs), self.height):
            some = obs[first : first + self.height]
            self._together[: len(some)], self._together[len(some) :] = some, 0.0
            found += list(self._forward("policy", self._together)[: len(some)])
        return found

    def _places_agree(self, height: int) -> bool:
        """Sets the height of products. Returns: whether a row has the same bits in each place of them."""
        self.height, self._together = height, aligned((height, self.spec.obs_dim))
        first, *others = self.outputs([np.linspace(-1.0, 1.0, self.spec.obs_dim, dtype=np.float32)] * height)
        return all(np.array_equal(first, other) for other in others)

    def sample(self, out: Array, noise: Any) -> Any:
        """Draws one action. Args: out: what `output` returned, or one of `outputs`. noise: one row of `noise`.

        Returns: Box: a new float32 (act_dim,) array, mean + std * noise. Discrete: int, by the inverse of the
            cumulative probabilities at `noise`.
        """
        if self.spec.discrete:
            cumulative = np.cumsum(np.exp(out - out.max()), dtype=np.float64)
            return min(int(cumulative.searchsorted(noise * cumulative[-1], side="right")), self.spec.act_dim - 1)
        return self._std * noise + out

    def mode(self, out: Array) -> Any:
        """The most likely action. Args: out: what `output` returned. Returns: as `sample`."""
        return int(out.argmax()) if self.spec.discrete else out.copy()

    def value(self, obs: Array) -> Array:
        """State values, float32 (T,), of T observations."""
        return self._forward("value", obs)[:, 0]

    def logp(self, obs: Array, act: Array) -> Array:
        """Log-probabilities (Box: log-densities), float32 (T,), of T actions. Args: act: as `sample` returns them."""
        out = self._forward("policy", obs)
        if self.spec.discrete:
            out -= out.max(axis=1, keepdims=True)
            return (out - np.log(np.exp(out).sum(axis=1, keepdims=True)))[np.arange(len(act)), act]
        log_std = self.params["policy/log_std"]
        z = (act - out) / self._std
        return -0.5 * np.square(z).sum(axis=1) - log_std.sum() - np.float32(0.5 * self.spec.act_dim * LOG_2PI)

    def _forward(self, net: str, obs: Array) -> Array:
        """Outputs for the rows of a batch: a new float32 (T, outputs) array."""
        return forward(self._nets[net], obs, buffers(self._nets[net], len(obs)))
