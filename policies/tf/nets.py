"""Networks as Keras models, with compiled losses, gradients and Adam.

Every function is compiled for any number of rows: a compilation for a constant number could change the arithmetic, and
so the bits.
"""

import math
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from policies import backend
from policies.backend import ADAM, Array, Minibatch, Outcome, Rows, n_threads
from policies.tf import setup
from policies.tf.setup import keras, tf

Tensor = Any
Dist = tuple[Any, ...]  # log-probabilities (N, act_dim); or means (N, act_dim) and log deviations (act_dim,)
LOG_2PI = math.log(2.0 * math.pi)


class Net(backend.Net):
    """See policies.backend.Net; its `model` is a keras.Sequential, (N, obs_dim) -> (N, outputs)."""

    signature: tuple[Any, ...]  # tf.TensorSpecs of the tensors that `loss` takes after `n`

    def build(self, device: str) -> None:
        spec = self.spec
        n_params = max(sum(map(math.prod, spec.shapes(net).values())) for net in ("policy", "value"))
        # TensorFlow fixes its threads once per process: all learners have what a minibatch can use.
        setup.configure(n_threads(self.threads, self.hyper.minibatch_rows, n_params))
        self.device = setup.device_name(device)
        with tf.device(self.device):
            inputs, *widths = spec.sizes(self.name)
            dense = [keras.layers.Dense(width, "tanh", dtype="float32") for width in widths[:-1]]
            dense.append(keras.layers.Dense(widths[-1], dtype="float32"))
            self.model = keras.Sequential([keras.Input((inputs,)), *dense], name=self.name)
            named = {f"{self.name}/{i}/weight": layer.kernel.value for i, layer in enumerate(dense)}
            named |= {f"{self.name}/{i}/bias": layer.bias.value for i, layer in enumerate(dense)}
            named["policy/log_std"] = self._log_std = tf.Variable(tf.zeros(self.shapes.get("policy/log_std", (0,))))
            self._parameters = [named[key] for key in self.shapes]
            moments = ([tf.Variable(tf.zeros_like(p)) for p in self._parameters] for _ in range(2))
            self._vectors = [self._parameters, *moments]
        self._clip, self._ent_coef = (tf.Variable(x) for x in (self.hyper.clip, self.hyper.ent_coef))
        self._boosts = [self.hyper.log_std_lr if key == "policy/log_std" else 1.0 for key in self.shapes]
        rows, integers, number = self.signature, tf.TensorSpec((None,), tf.int64), tf.TensorSpec(())
        self.compile(
            _gradient=[rows, integers, number],
            _adam=[tf.TensorSpec((self.n_params,)), tf.TensorSpec((2,))],
            _pass=[rows, integers, integers, tf.TensorSpec((None,)), tf.TensorSpec((None, 2))],
        )

    def compile(self, **signatures: Any) -> None:
        """Replaces methods by compiled ones. Args: signatures: tf.TensorSpecs of each one's arguments, by its name."""
        for name, signature in signatures.items():
            setattr(self, name, tf.function(getattr(self, name), input_signature=signature))

    def vector(self, which: int = 0) -> Array:
        return np.concatenate([np.ravel(variable) for variable in self._vectors[which]])

    def set_vector(self, vector: Array, which: int = 0) -> None:
        for variable, values in zip(self._vectors[which], self.by_name(vector).values()):
            variable.assign(values)

    def copied(self, array: Array, dtype: type = np.float32) -> Tensor:
        return tf.constant(np.array(array, dtype, order="C"))  # of a copy: the tensor may use the array's own memory

    def using(self, threads: int) -> AbstractContextManager[Any]:
        self._clip.assign(self.hyper.clip)  # a compiled function would keep the number that it was compiled with
        self._ent_coef.assign(self.hyper.ent_coef)
        return tf.device(self.device)

    def step(self, grad: Any, lr: float) -> None:
        self._adam(grad, self._planned(lr, 1)[0])

    def descend(self, rows: Rows, minibatches: Iterable[Minibatch], lr: float) -> None:
        """See policies.learner.Learner: all steps in one compiled loop, in a fifth of the time."""
        order, totals = zip(*minibatches)
        counts, planned = np.array([len(minibatch) for minibatch in order]), self._planned(lr, len(order))
        self._pass(rows.fields, np.concatenate(order), counts, np.array(totals, np.float32), planned)

    def _pass(self, fields: tuple[Tensor, ...], order: Tensor, counts: Tensor, totals: Tensor, planned: Tensor) -> None:
        """Step i takes the next `counts[i]` of the rows `order`."""
        start = tf.constant(0, tf.int64)
        for i in tf.range(tf.shape(counts)[0]):
            stop = start + counts[i]
            self._adam(self._gradient(fields, order[start:stop], totals[i]), planned[i])
            start = stop

    def _planned(self, lr: float, n: int) -> Array:
        """Counts `n` steps. Returns: float32 (n, 2), step size and epsilon of each, both with the bias corrections.

        They are computed in float64, because 1 - beta2**t loses digits; Keras' Adam adds epsilon after them instead.
        """
        t = self.steps + np.arange(1, n + 1)
        self.steps += n
        bias = np.sqrt(1.0 - ADAM["beta2"] ** t)
        return np.stack((lr * bias / (1.0 - ADAM["beta1"] ** t), ADAM["eps"] * bias), 1).astype(np.float32)

    def _adam(self, grad: Tensor, planned: Tensor) -> None:
        parts = tf.split(grad, [math.prod(shape) for shape in self.shapes.values()])
        shrink = tf.minimum(self.hyper.max_grad_norm / tf.linalg.global_norm(parts), 1.0)
        for parameter, m, v, part, boost in zip(*self._vectors, parts, self._boosts):
            tf.raw_ops.ResourceApplyAdam(
                var=parameter.handle, m=m.handle, v=v.handle, grad=tf.reshape(part, parameter.shape) * shrink,
                beta1_power=0.0, beta2_power=0.0,  # the bias corrections are in `planned`
                lr=planned[0] * boost, beta1=ADAM["beta1"], beta2=ADAM["beta2"], epsilon=planned[1],
            )  # fmt: skip

    def loss(self, n: Tensor, *fields: Tensor) -> Tensor:
        """Loss of some rows of a minibatch. Args: n: rows of the whole minibatch. fields: as `signature` has them."""
        raise NotImplementedError

    def loss_gradient(self, rows: Rows, minibatch: Array, n: int) -> Tensor:
        return self._gradient(rows.fields, minibatch, np.float32(n))

    def _gradient(self, fields: tuple[Tensor, ...], minibatch: Tensor, n: Tensor) -> Tensor:
        with tf.GradientTape() as tape:
            loss = self.loss(n, *(tf.gather(whole, minibatch) for whole in fields))
        return flatten(tape.gradient(loss, self._parameters, unconnected_gradients="zero"))


def flatten(tensors: Iterable[Tensor]) -> Tensor:
    """One vector, (P,), of a tensor for each parameter."""
    return tf.concat([tf.reshape(tensor, (-1,)) for tensor in tensors], 0)


class PolicyNet(Net, backend.PolicyNet):
    def build(self, device: str) -> None:
        spec = self.spec
        obs, out, number = (tf.TensorSpec((None, *size)) for size in ((spec.obs_dim,), (spec.act_dim,), ()))
        act = tf.TensorSpec((None,), tf.int64) if spec.discrete else out
        self.signature = obs, act, number, number
        dist = (out,) if spec.discrete else (out, tf.TensorSpec((spec.act_dim,)))
        super().build(device)
        vector = tf.TensorSpec((self.n_params,))
        self.compile(freeze=[obs, act], _terms=[self.signature, dist], _product=[obs, vector, tf.TensorSpec(())])

    def dist(self, obs: Tensor) -> Dist:
        """The policy's distributions of actions. Args: obs: float32 (N, obs_dim)."""
        out = self.model(obs)
        return (tf.nn.log_softmax(out),) if self.spec.discrete else (out, tf.convert_to_tensor(self._log_std))

    def logp(self, dist: Dist, act: Tensor) -> Tensor:
        """Log-probabilities of actions, nats, (N,)."""
        if self.spec.discrete:
            return tf.gather(dist[0], act, batch_dims=1)
        mean, log_std = dist
        z = (act - mean) * tf.exp(-log_std)
        constant = 0.5 * LOG_2PI * self.spec.act_dim
        return -0.5 * tf.reduce_sum(tf.square(z), 1) - (tf.reduce_sum(log_std) + constant)

    def entropy(self, dist: Dist) -> Tensor:
        """Sum of the entropies, nats."""
        if self.spec.discrete:
            return tf.reduce_sum(-tf.reduce_sum(tf.exp(dist[0]) * dist[0], 1))
        mean, log_std = dist
        constant = 0.5 * LOG_2PI * self.spec.act_dim + 0.5 * self.spec.act_dim
        return tf.reduce_sum(tf.fill((tf.shape(mean)[0],), tf.reduce_sum(log_std) + constant))

    def kl(self, old: Dist, new: Dist) -> Tensor:
        """Sum of KL(old || new), nats."""
        if self.spec.discrete:
            return tf.reduce_sum(tf.reduce_sum(tf.exp(old[0]) * (old[0] - new[0]), 1))
        (old_mean, old_log_std), (mean, log_std) = old, new
        shift = (mean - old_mean) * tf.exp(-log_std)
        log_ratio = 2.0 * (old_log_std - log_std)
        of_stds = tf.reduce_sum(tf.math.expm1(log_ratio) - log_ratio)
        return tf.reduce_sum(0.5 * (of_stds + tf.reduce_sum(tf.square(shift), 1)))

    def freeze(self, obs: Tensor, act: Tensor) -> tuple[Any, Tensor]:
        dist = self.dist(obs)
        return dist, self.logp(dist, act)

    def outcome(self, rows: Rows) -> Outcome:
        with tf.GradientTape() as tape:
            terms, clipped = self._terms(rows.fields, rows.old)
        sums = np.append(terms.numpy(), clipped.numpy()).astype(np.float64)

        def gradient(*weights: float) -> Tensor:
            return flatten(tape.gradient(terms, self._parameters, tf.constant(weights), unconnected_gradients="zero"))

        return Outcome(sums, gradient)

    def _terms(self, fields: tuple[Tensor, ...], old: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """What `Outcome.gradient` differentiates, and the number of clipped rows."""
        # A gradient by the observations would cost as much as the first layer, and the tape cannot leave it out itself.
        (obs, act, adv, old_logp), old = tf.nest.map_structure(tf.stop_gradient, (fields, old))
        dist = self.dist(obs)
        ratio = tf.exp(self.logp(dist, act) - old_logp)
        clipped = tf.math.count_nonzero(tf.abs(ratio - 1.0) > self._clip)
        return tf.stack([self.kl(old, dist), self.entropy(dist), tf.reduce_sum(-ratio * adv)]), clipped

    def loss(self, n: Tensor, *fields: Tensor) -> Tensor:
        """See Net: -sum(min(ratio * adv, clipped ratio * adv)) / n, less the entropy."""
        obs, act, adv, old_logp = fields
        dist, clip = self.dist(obs), self._clip
        ratio = tf.exp(self.logp(dist, act) - old_logp)
        gain = tf.reduce_sum(tf.minimum(ratio * adv, tf.clip_by_value(ratio, 1.0 - clip, 1.0 + clip) * adv))
        return -(gain + self._ent_coef * self.entropy(dist)) / n

    def fisher(self, rows: Rows, n: int) -> Callable[[Array], Tensor]:
        """See policies.backend.PolicyNet: by differentiating the divergence from the policy itself twice."""
        return lambda vector: self._product(rows.fields[0], vector, np.float32(n))

    def _product(self, obs: Tensor, vector: Tensor, n: Tensor) -> Tensor:
        with tf.GradientTape() as outer:
            with tf.GradientTape() as inner:
                dist = self.dist(obs)
                kl = self.kl(tf.nest.map_structure(tf.stop_gradient, dist), dist) / n
            slope = flatten(inner.gradient(kl, self._parameters, unconnected_gradients="zero"))
            along = tf.reduce_sum(slope * vector)
        return flatten(outer.gradient(along, self._parameters, unconnected_gradients="zero"))


class ValueNet(Net, backend.ValueNet):
    def build(self, device: str) -> None:
        obs = tf.TensorSpec((None, self.spec.obs_dim))
        self.signature = obs, tf.TensorSpec((None,))
        super().build(device)
        self._predict = tf.function(lambda obs: self.model(obs)[:, 0], input_signature=[obs])

    def values(self, rows: Rows) -> Array:
        return self._predict(rows.fields[0]).numpy()

    def loss(self, n: Tensor, *fields: Tensor) -> Tensor:
        obs, ret = fields
        return tf.reduce_sum(tf.square(self._predict(obs) - ret)) / n
