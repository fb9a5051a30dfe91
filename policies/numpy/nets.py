"""The networks of the NumPy backend: losses, gradients and Adam, on one flat parameter vector."""

import functools
import math
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
from threadpoolctl import ThreadpoolController  # the size of whichever BLAS NumPy was built with

from policies import backend, mlp
from policies.backend import ADAM, Array, Outcome, Rows
from policies.numpy.passes import Worker

PARAMS_PER_THREAD = 2**18  # of a part of a step of Adam
BLAS = ThreadpoolController().select(user_api="blas")


@functools.cache
def _map(threads: int, process: int) -> Callable[..., Iterable[Any]]:
    """`map` in threads of a process (its parent's do not run in a child), each without NumPy's warnings."""
    return ThreadPoolExecutor(threads, initializer=np.seterr, initargs=("ignore",)).map


class Net(backend.Net):
    forks = True
    workers: Sequence[Worker]  # as many as `threads`; each has the same part of a batch whenever it is of the same size
    changes = 0  # of the parameters, so far

    def build(self, device: str) -> None:
        if device != "cpu":
            raise RuntimeError("NumPy computes on the cpu; --framework torch uses other devices")
        *self._vectors, self._scratch = (mlp.aligned((self.n_params,), shared=True) for _ in range(4))
        self.workers = [Worker(self, self._vectors[0]) for _ in range(self.threads)]

    def vector(self, which: int = 0) -> Array:
        return self._vectors[which].copy()

    def set_vector(self, vector: Array, which: int = 0) -> None:
        self._vectors[which][:] = vector
        self.changes += 1

    def copied(self, array: Array, dtype: type = np.float32) -> Array:
        ours = mlp.aligned(array.shape, dtype)
        ours[...] = array
        return ours

    def using(self, threads: int) -> AbstractContextManager[Any]:
        return BLAS.limit(limits=1)

    def shared(self, call: Callable[[Any, Any], Any], whole: Array, minibatch: Array | None = None) -> list[Any]:
        """`call(worker, part)` for the parts of a batch, at once where it is large. Returns: the results, in order.

        Args: whole: an array of all rows; each worker gets a slice. minibatch: int64, positions of some rows to share.
        """
        n = len(whole if minibatch is None else minibatch)
        k = self.n_threads(n)
        slices = [slice(n * i // k, n * (i + 1) // k) for i in range(k)]
        # of all rows slices too, as the order of a sum does not matter
        parts = slices if minibatch is None or n == len(whole) else [minibatch[part] for part in slices]
        run = _map(self.threads, os.getpid()) if k > 1 else map
        return list(run(call, self.workers, parts))

    def gradient_of(self, call: Callable[[Any, Any], None], whole: Array, minibatch: Array | None = None) -> Array:
        """Sum of the gradients that `call(worker, part)` leaves in the workers. Args: as of `shared`."""
        k = len(self.shared(call, whole, minibatch))
        first = self.workers[0].grad
        for other in self.workers[1:k]:
            first += other.grad
        return first

    def step(self, grad: Array, lr: float) -> None:
        self.steps += 1
        self.changes += 1
        norm = math.sqrt(grad.dot(grad))
        clip = self.hyper.max_grad_norm / norm if norm > self.hyper.max_grad_norm else 1.0
        # element by element, so the bits are the same however it is cut
        parts = [slice(start, start + PARAMS_PER_THREAD) for start in range(0, self.n_params, PARAMS_PER_THREAD)]
        run = _map(self.threads, os.getpid()) if len(parts) > 1 else map
        list(run(lambda part: self._adam(part, grad, clip, lr), parts))
        if "policy/log_std" in self.shapes and self.hyper.log_std_lr != 1.0:
            log_std, moved = (self.by_name(x)["policy/log_std"] for x in (self._vectors[0], self._scratch))
            log_std -= (self.hyper.log_std_lr - 1.0) * moved

    def _adam(self, part: slice, grad: Array, clip: float, lr: float) -> None:
        """A step of some of the parameters; both bias corrections are folded into the step size."""
        beta1, beta2, bias = ADAM["beta1"], ADAM["beta2"], math.sqrt(1.0 - ADAM["beta2"] ** self.steps)
        flat, m, v, scratch, grad = (x[part] for x in (*self._vectors, self._scratch, grad))
        np.multiply(m, beta1, m)
        m += np.multiply(grad, clip * (1.0 - beta1), scratch)
        np.multiply(v, beta2, v)
        np.multiply(grad, grad, scratch)
        v += np.multiply(scratch, clip * clip * (1.0 - beta2), scratch)
        np.sqrt(v, scratch)
        np.add(scratch, ADAM["eps"] * bias, scratch)
        np.divide(m, scratch, scratch)
        flat -= np.multiply(scratch, lr * bias / (1.0 - beta1**self.steps), scratch)


class PolicyNet(Net, backend.PolicyNet):
    """See policies.backend.PolicyNet. `Rows.old` has an item for each worker's part."""

    def freeze(self, obs: Array, act: Array) -> tuple[tuple[Any, ...], Array]:
        def old(worker: Worker, part: slice) -> tuple[Any, Array]:
            dist = worker.dist_of(obs, part)
            return dist.freeze(), dist.logp(act[part])

        olds, logps = zip(*self.shared(old, obs))
        return olds, np.concatenate(logps)

    def outcome(self, rows: Rows) -> Outcome:
        obs, act, adv, old_logp = rows.fields
        olds, ratios = dict(zip(self.workers, rows.old)), {}

        def sums(worker: Worker, part: slice) -> tuple[Any, ...]:
            dist = worker.dist_of(obs, part)
            ratios[worker] = ratio = np.exp(dist.logp(act[part]) - old_logp[part])
            clipped = np.count_nonzero(np.abs(ratio - 1.0) > self.hyper.clip)
            return dist.kl(olds[worker]), dist.entropy(), -float(ratio.dot(adv[part])), clipped

        def gradient(kl: float, entropy: float, loss: float) -> Array:
            def backward(worker: Worker, part: slice) -> None:
                d_logp = -loss * ratios[worker] * adv[part]
                worker.backward(worker.dist.backward(d_logp, kl, entropy, olds[worker]))

            return self.gradient_of(backward, adv)

        return Outcome(np.array(self.shared(sums, adv), np.float64).sum(axis=0), gradient)

    def loss_gradient(self, rows: Rows, minibatch: Array, n: int) -> Array:
        """See policies.backend.Net: of -sum(min(ratio * adv, clipped ratio * adv)) / n, less the entropy."""
        clip, ent_coef = self.hyper.clip, self.hyper.ent_coef
        obs, *fields = rows.fields

        def backward(worker: Worker, part: Array) -> None:
            act, adv, old_logp = (field[part] for field in fields)
            dist = worker.dist_of(obs, part)
            ratio = np.exp(dist.logp(act) - old_logp)
            gain = ratio * adv
            gain *= gain <= np.minimum(np.maximum(ratio, 1.0 - clip), 1.0 + clip) * adv  # 0 where the clip binds
            gain *= -1.0 / n
            worker.backward(dist.backward(gain, d_entropy=-ent_coef / n))

        return self.gradient_of(backward, obs, minibatch)

    def fisher(self, rows: Rows, n: int) -> Callable[[Array], Array]:
        """See policies.backend.PolicyNet: J' M J v, J the derivative of the outputs, M the Fisher matrix over them."""
        obs = rows.fields[0]
        self.shared(lambda worker, part: worker.dist_of(obs, part), obs)

        def product(vector: Array) -> Array:
            d_log_std = self.by_name(vector).get("policy/log_std")

            def backward(worker: Worker, _: slice) -> None:
                worker.backward(worker.dist.fisher(worker.jvp(vector), d_log_std, n))

            return self.gradient_of(backward, obs)

        return product


class ValueNet(Net, backend.ValueNet):
    def values(self, rows: Rows) -> Array:
        obs, ret = rows.fields
        return np.concatenate(self.shared(lambda worker, part: worker.forward(obs, part)[:, 0].copy(), ret))

    def loss_gradient(self, rows: Rows, minibatch: Array, n: int) -> Array:
        obs, ret = rows.fields

        def backward(worker: Worker, part: Array) -> None:
            worker.backward((worker.forward(obs, part) - ret[part, None]) * np.float32(2.0 / n))

        return self.gradient_of(backward, obs, minibatch)
