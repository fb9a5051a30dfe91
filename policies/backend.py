"""What a framework provides: a network, its action distributions, its optimizer. Everything else is written once.

A backend is a package with the two classes `PolicyNet` and `ValueNet`. They hold the parameters on a device and do the
arithmetic on the rows of one learner; what is summed over learners, when to step and when to stop is decided outside.

Vectors are float32 (P,): all parameters of a network, or a gradient by them, in the order of its `shapes`. A network
returns arrays or its own tensors, and takes either.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, NamedTuple

import numpy as np

from policies.actor import Spec
from policies.data_parallel import Part
from policies.hyper import Hyper

Array = np.ndarray
Params = Mapping[str, Array]
Minibatch = tuple[Array, int]  # int64 (n,), positions of a learner's rows; rows of the whole minibatch
# Least work per thread, in rows times parameters. With less, on 2 cores, a second thread gains little (320 steps of 125
# rows got slower), and costs a multiple where another process needs the core, because threads spin at barriers.
WORK_PER_THREAD = 8e6
ADAM = {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8}  # Kingma and Ba 2015 (arXiv:1412.6980), algorithm 1


class Outcome(NamedTuple):
    """The policy as it is now on a learner's rows, compared with the policy before its update."""

    # float64 (4,), over the rows: KL(old || new) and entropy, nats; surrogate loss, -ratio * adv; number of rows whose
    # probability ratio is beyond the clip range
    sums: Array
    # Gradient, float32 (P,), of the first three sums, weighted as the arguments say; any next call may overwrite it.
    # Call it once, of the newest outcome, before the parameters change.
    gradient: Callable[[float, float, float], Any]


class Rows(NamedTuple):
    """A learner's rows of a batch, on the device."""

    fields: tuple[Any, ...]  # obs, act, adv and log-probabilities when the actions were drawn; or obs and ret
    old: Any = None  # distributions of actions before the update, of the backend's own kind; None: a value function's
    part: Part = Part.whole(0)  # which rows of the whole batch these are, where a policy's update rule uses them


class Net(ABC):
    """A network and its Adam, with gradients clipped by norm."""

    name: ClassVar[str]  # "policy" or "value"
    descend: ClassVar[Any] = None  # what makes all of Learner.descend's steps of one learner at once, if it is faster
    forks: ClassVar[bool] = False  # whether it computes in a child made by fork too, on arrays that are shared with it

    def __init__(self, spec: Spec, params: Params, hyper: Hyper, threads: int = 1, device: str = "cpu"):
        """Copies the network's parameters. Args and raises: as policies.learners.Learners."""
        self.spec, self.hyper, self.threads = spec, hyper, threads
        self.steps = 0  # of Adam, so far
        self.shapes: dict[str, tuple[int, ...]] = spec.shapes(self.name)  # by name; P is the sum of their sizes
        self.build(device)
        self.load(params)

    @property
    def n_params(self) -> int:
        """P."""
        return sum(math.prod(shape) for shape in self.shapes.values())

    @abstractmethod
    def build(self, device: str) -> None:
        """Makes the network and the optimizer."""

    def load(self, params: Params) -> None:
        """Copies this network's parameters into it. ValueError: one is missing or of another shape; nothing changed."""
        for key, shape in self.shapes.items():
            found = params[key].shape if key in params else "nothing"
            if found != shape:
                raise ValueError(f"{key}: expected an array of shape {shape}, got {found}")
        self.set_vector(np.concatenate([np.ravel(params[key]) for key in self.shapes]))

    def by_name(self, vector: Any) -> dict[str, Any]:
        """Views of a vector by parameter name. Args: vector: (P,) array or tensor."""
        views, start = {}, 0
        for key, shape in self.shapes.items():
            stop = start + math.prod(shape)
            views[key] = vector[start:stop].reshape(shape)
            start = stop
        return views

    @abstractmethod
    def vector(self, which: int = 0) -> Array:
        """A copy, float32 (P,), of the parameters; 1, 2: of Adam's running means of the gradient, and of its square."""

    @abstractmethod
    def set_vector(self, vector: Array, which: int = 0) -> None:
        """Overwrites what `vector` returns."""

    @abstractmethod
    def copied(self, array: Array, dtype: type = np.float32) -> Any:
        """A copy of the array with this dtype, on the device."""

    @abstractmethod
    def step(self, grad: Any, lr: float) -> None:
        """One step of Adam. A gradient that is not finite leaves parameters that are not.

        Args: grad: float32 (P,), may be overwritten. lr: step size; `hyper.log_std_lr` times it for the deviations.
        """

    @abstractmethod
    def loss_gradient(self, rows: Rows, minibatch: Array, n: int) -> Any:
        """Gradient of the clipped surrogate loss, or of the squared errors: float32 (P,), until the next call.

        Args: minibatch: int64, positions in the rows. n: number by which the sum over them is divided.
        """

    def n_threads(self, n_rows: int) -> int:
        """Threads that products of `n_rows` rows use."""
        return n_threads(self.threads, n_rows, self.n_params)

    def using(self, threads: int) -> AbstractContextManager[Any]:
        """Context in which the framework computes with this number of threads, on this network's device."""
        return nullcontext()


class PolicyNet(Net):
    """A network that acts: the means and deviations of a Gaussian, or the logits of a categorical distribution."""

    name = "policy"

    def rows(self, obs: Array, act: Array, adv: Array, logp: Array | None) -> Rows:
        """Copies a batch to the device, with the distributions of the policy as it is now.

        Args and raises: as policies.rules.Policy.update; adv: normalised.
        """
        spec, n = self.spec, len(adv)
        require_shape(obs, (n, spec.obs_dim))
        require_shape(act, (n,) if spec.discrete else (n, spec.act_dim))
        x, acts = self.copied(obs), self.copied(act, np.int64 if spec.discrete else np.float32)
        old, now_logp = self.freeze(x, acts)
        if logp is not None:
            require_shape(logp, (n,))
            now_logp = self.copied(logp)
        return Rows((x, acts, self.copied(adv), now_logp), old)

    @abstractmethod
    def freeze(self, obs: Any, act: Any) -> tuple[Any, Any]:
        """(`Rows.old`, log-probabilities of the actions) by the policy as it is now. Args: of `Rows.fields`."""

    @abstractmethod
    def outcome(self, rows: Rows) -> Outcome:
        """The policy as it is now on these rows."""

    @abstractmethod
    def fisher(self, rows: Rows, n: int) -> Callable[[Array], Any]:
        """The Fisher matrix: the second derivative of the sum of KL divergences over these rows, divided by `n`.

        Returns: function that multiplies it with a float32 (P,) array; the next call may overwrite the product.
        """


class ValueNet(Net):
    """A network with one output: the return that follows an observation."""

    name = "value"

    def rows(self, obs: Array, ret: Array) -> Rows:
        """Copies a batch to the device. Args and raises: as policies.learners.ValueFunction.fit."""
        require_shape(obs, (len(ret), self.spec.obs_dim))
        return Rows((self.copied(obs), self.copied(ret)))

    @abstractmethod
    def values(self, rows: Rows) -> Array:
        """Estimates for these rows: float32 (N,) array."""


def require_shape(array: Array, shape: tuple[int, ...]) -> None:
    """Raises ValueError: the array has another shape."""
    if array.shape != shape:
        raise ValueError(f"expected an array of shape {shape}, got {array.shape}")


def as_array(vector: Any) -> Array:
    """A vector of any backend as an array that may be overwritten."""
    if isinstance(vector, np.ndarray):
        return vector
    return (vector.cpu() if hasattr(vector, "is_cuda") else vector).numpy()


def n_threads(available: int, rows: int, n_params: int) -> int:
    """Number of threads that a matrix product of this number of rows and parameters can use, 1 to `available`.

    It depends on the size of the work only: with a measurement the bits would vary from run to run.
    """
    return max(1, min(available, int(rows * n_params / WORK_PER_THREAD)))
