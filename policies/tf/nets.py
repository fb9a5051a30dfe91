"""The networks as Keras models."""

import numpy as np

from policies.tf.setup import keras, tf


class Net(keras.Model):
    """Tanh hidden layers and a linear output; a Gaussian policy has its log deviations as another weight.

    Attributes:
        views: dict of parameter name to tf.Variable, in the order of Spec.shapes.
        log_std: keras.Variable, float32 (act_dim,); None without a Gaussian.
        n_params: length of a flat vector that holds all parameters.
    """

    def __init__(self, spec, name, params):
        """Args: spec: policies.actor.Spec. name: "policy" or "value". params: as `load`'s, copied."""
        super().__init__(name=name, dtype="float32")
        inputs, *widths = spec.sizes(name)
        dense = [self._dense(width, last=i == len(widths) - 1) for i, width in enumerate(widths)]
        self._stack = keras.Sequential([keras.Input((inputs,)), *dense])
        named = {}
        for i, layer in enumerate(dense):
            named |= {f"{name}/{i}/weight": layer.kernel, f"{name}/{i}/bias": layer.bias}
        shapes = spec.shapes(name)
        self.log_std = None
        if "policy/log_std" in shapes:
            self.log_std = self.add_weight(shapes["policy/log_std"], "zeros", "float32", name="log_std")
            named["policy/log_std"] = self.log_std
        self.views = {key: named[key].value for key in shapes}
        self._shapes = list(shapes.values())
        self._sizes = [int(np.prod(shape)) for shape in self._shapes]
        self.n_params = sum(self._sizes)
        self.load(params)

    @staticmethod
    def _dense(width, last):
        activation = None if last else "tanh"
        return keras.layers.Dense(width, activation, kernel_initializer="zeros", dtype="float32")

    def call(self, obs):
        """Outputs for a batch. Args: obs: float32 (N, inputs) tensor. Returns: float32 (N, outputs) tensor."""
        return self._stack(obs)

    def with_jvp(self, obs, direction):
        """Outputs for a batch, and their directional derivative by the parameters.

        Args:
            obs: float32 (N, inputs) tensor.
            direction: float32 (P,) tensor.

        Returns:
            (outputs, derivative): float32 (N, outputs) tensors.
        """
        direction = dict(zip(self.views, self.unflatten(direction)))
        x, d_x = obs, None
        for i, layer in enumerate(self._stack.layers):
            moved = x @ direction[f"{self.name}/{i}/weight"] + direction[f"{self.name}/{i}/bias"]
            if i:
                moved += d_x @ layer.kernel
            x = layer(x)
            d_x = moved * (1.0 - tf.square(x))  # the derivative of tanh
        return x, moved

    def load(self, params):
        """Copies parameters into the network. Args: params: dict with at least this network's names, float32 arrays.

        Raises:
            ValueError: a name is missing or a shape differs; nothing was changed.
        """
        for key, view in self.views.items():
            found = params[key].shape if key in params else "nothing"
            if found != tuple(view.shape):
                raise ValueError(f"{key}: expected an array of shape {tuple(view.shape)}, got {found}")
        for key, view in self.views.items():
            view.assign(params[key])

    def arrays(self):
        """Copies of the parameters: dict of str to float32 array."""
        return {key: view.numpy().copy() for key, view in self.views.items()}

    def copy_to(self, out):
        """Copies the parameters out. Args: out: dict with at least this network's names; its arrays are overwritten."""
        for key, view in self.views.items():
            out[key][...] = view.numpy()

    @staticmethod
    def flatten(tensors):
        """One vector, (P,), of a tensor per parameter. Args: tensors: in the order of `views`."""
        return tf.concat([tf.reshape(tensor, (-1,)) for tensor in tensors], 0)

    def unflatten(self, flat):
        """The inverse of `flatten`. Args: flat: (P,) array or tensor. Returns: list of tensors."""
        return [tf.reshape(part, shape) for part, shape in zip(tf.split(flat, self._sizes), self._shapes)]

    def assign(self, flat, variables=None):
        """Overwrites variables. Args: flat: (P,). variables: in the order of `views`; None: the parameters."""
        for variable, tensor in zip(variables or self.views.values(), self.unflatten(flat)):
            variable.assign(tensor)
