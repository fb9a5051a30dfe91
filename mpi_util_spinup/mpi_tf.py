"""Data-parallel TensorFlow on every rank, with averaged gradients: `spinup.utils.mpi_tf`.

In a tf.compat.v1 graph the functions return operations for the session to run; in eager mode they act at once; they
also work inside tf.function. All ranks must run a collective operation equally often, in the same order. `comm` is a
communicator; None: all ranks. An error in a running graph comes as tf.errors.UnknownError with its text.

    optimizer = mpi_tf.MpiAdamOptimizer(learning_rate=1e-3)           # tf.compat.v1
    optimizer = mpi_tf.average_gradients(keras.optimizers.Adam(1e-3)) # Keras 3
    mpi_util.rank0_bcast_wts(model)                                   # the same start on all ranks
"""

import functools
import importlib
import itertools
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mpi_util.arrays.adapters import adapter_for, as_numbers, framework, weight_name
from mpi_util.arrays.adapters.tensorflow import check_dtype
from mpi_util.collectives.bcast import rank0_bcast_wts
from mpi_util.collectives.reduce import average
from mpi_util.errors import UsageError, WeightsError
from mpi_util.ranks.identity import Comm

__all__ = [
    "MpiAdamOptimizer", "assign_params_from_flat", "average_gradients", "flat_concat", "sync_all_params", "sync_params",
]  # fmt: skip

_turn = threading.Lock()  # a graph may run two operations at once; a rank can be in only one collective call


def flat_concat(xs: Sequence[Any]) -> Any:
    """All values of tensors or variables of one dtype as one tensor, shape (sum of their sizes,)."""
    tf = framework("tensorflow")
    return tf.concat([tf.reshape(x, (-1,)) for x in xs], axis=0)


def assign_params_from_flat(x: Any, params: Sequence[Any]) -> Any:
    """Sets variables of known shapes from a tensor of shape (sum of their sizes,), as `flat_concat` makes it.

    Returns the operation that sets them, which tf.function runs by itself; None in eager mode, where they are set.
    """
    tf = framework("tensorflow")
    params = _variables(tf, params)
    parts = tf.split(x, [param.shape.num_elements() for param in params])
    return tf.group(*[param.assign(tf.reshape(part, param.shape)) for param, part in zip(params, parts)])


def sync_params(params: Sequence[Any], *, comm: Comm = None) -> Any:
    """Collective when it acts: sets variables to rank 0's values. Waits until all ranks take part.

    Args: params: variables of TensorFlow or Keras, of any dtype but string; the same on every rank.
    Returns what `assign_params_from_flat` does. Raises what `rank0_bcast_wts` does.
    """
    tf = framework("tensorflow")
    params = _variables(tf, params)
    if tf.executing_eagerly() or not params:
        rank0_bcast_wts(params, comm=comm)
        return None
    return tf.autograph.experimental.do_not_convert(_sync_operation)(tf, params, comm)


def _sync_operation(tf: Any, params: list[Any], comm: Comm) -> Any:
    dtypes = {weight_name(i, param.name): param.dtype.base_dtype for i, param in enumerate(params)}
    for name, dtype in dtypes.items():
        check_dtype(name, dtype)

    def values_of_rank0(*values: np.ndarray) -> list[np.ndarray]:
        copies = dict(zip(dtypes, map(np.array, values)))
        with _turn:
            rank0_bcast_wts(copies, comm=comm)
        return list(copies.values())

    # read_value comes after the caller's control dependencies; the variable itself may stand for an earlier value
    now = [param.read_value() for param in params]
    values = tf.numpy_function(values_of_rank0, now, list(dtypes.values()), name="sync_params")
    return tf.group(*[param.assign(tf.ensure_shape(value, param.shape)) for param, value in zip(params, values)])


def sync_all_params(*, comm: Comm = None) -> Any:
    """Collective when it acts: `sync_params` of all global variables of the tf.compat.v1 graph. WeightsError: none."""
    params = framework("tensorflow").compat.v1.global_variables()
    if not params:
        raise WeightsError("sync_all_params: no graph with global variables here; use sync_params(model.weights)")
    return sync_params(params, comm=comm)


def average_gradients(optimizer: Any, *, comm: Comm = None) -> Any:
    """Makes a Keras optimizer average the gradients over the ranks before it applies them, and returns it.

    This holds in `model.fit`, `apply` and `apply_gradients`, inside tf.function too, with Keras on TensorFlow or torch.
    Each step is one collective call, so all ranks must take the same number of steps. After `rank0_bcast_wts(model)`
    the models stay bit-identical. A model that is saved with the optimizer loads without mpi_util, with a plain one.

    XLA cannot call back to Python: compile a model with `jit_compile=False` where Keras would choose otherwise (on a
    GPU). For float16 training give this a `LossScaleOptimizer`, so that ranks skip the same steps.

    Raises UsageError: not a Keras optimizer, or Keras runs on another backend; in a step: XLA. A step raises
    RankMismatchError on every rank: variables have a gradient on some ranks only, or differ.
    """
    keras = framework("keras")
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise UsageError(f"average_gradients takes a Keras optimizer, e.g. keras.optimizers.Adam(); got {optimizer!r}")
    backend = keras.backend.backend()
    if backend not in ("tensorflow", "torch"):
        raise UsageError(f"average_gradients needs Keras on tensorflow or torch; it runs on {backend}")
    means = _tensorflow_means if backend == "tensorflow" else _means_of_values
    plain_apply = functools.partial(type(optimizer).apply, optimizer)

    def apply(grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> None:
        grads, variables = list(grads), None if trainable_variables is None else list(trainable_variables)
        paths = [getattr(v, "path", v.name) for v in variables or ()] or [""] * len(grads)
        plain_apply(means(f"a step of {type(optimizer).__name__}", grads, paths, comm), variables)

    optimizer.apply = apply  # on the object, so that its class stays the one under which Keras saves it
    if backend == "tensorflow":
        optimizer.apply = framework("tensorflow").autograph.experimental.do_not_convert(apply)
    return optimizer


@functools.cache
def _made_when_first_used(name: str) -> type:
    if name != "MpiAdamOptimizer":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    tf: Any = framework("tensorflow")

    class MpiAdamOptimizer(tf.compat.v1.train.AdamOptimizer):  # type: ignore[misc]  # it has no types
        """tf.compat.v1's Adam, which averages the gradients over the ranks, and after the update sends rank 0's values.

        Each step is collective. Collective operations of one rank must not run in parallel: where one session.run does
        several steps, put tf.control_dependencies between them. A step raises RankMismatchError: variables have a
        gradient on some ranks only, or differ.
        """

        def __init__(self, *args: Any, comm: Comm = None, **kwargs: Any):
            super().__init__(*args, **kwargs)
            self.comm = comm

        def compute_gradients(self, *args: Any, **kwargs: Any) -> list[tuple[Any, Any]]:
            """As in tf.compat.v1, but each gradient is the mean over the ranks. Variables without one are left out."""
            grads, variables = zip(*super().compute_gradients(*args, **kwargs))
            paths = [variable.name for variable in variables]
            means = _tensorflow_means(f"a step of {self.get_name()}", list(grads), paths, self.comm)
            return [(mean, variable) for mean, variable in zip(means, variables) if mean is not None]

        def apply_gradients(self, grads_and_vars: Any, global_step: Any = None, name: str | None = None) -> Any:
            """As in tf.compat.v1, followed by `sync_params` of the variables."""
            grads_and_vars = list(grads_and_vars)
            applied = super().apply_gradients(grads_and_vars, global_step, name)
            with tf.control_dependencies([] if tf.executing_eagerly() else [applied]):
                synced = sync_params([variable for _, variable in grads_and_vars], comm=self.comm)
            return applied if synced is None else tf.group(applied, synced)

    MpiAdamOptimizer.__qualname__ = "MpiAdamOptimizer"
    return MpiAdamOptimizer


def _tensorflow_means(op: str, grads: list[Any], paths: list[str], comm: Comm) -> list[Any]:
    """The mean of each gradient over the ranks, all as one operation; None where no rank has one."""
    tf = framework("tensorflow")
    grads = [tf.convert_to_tensor(grad) if isinstance(grad, tf.IndexedSlices) else grad for grad in grads]
    present = [i for i, grad in enumerate(grads) if grad is not None]
    if tf.executing_eagerly() or not present:
        return _means_of_values(op, grads, paths, comm)
    context = importlib.import_module("tensorflow.python.ops.control_flow_util")  # not public
    if context.GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph()):
        raise UsageError(f"{op}: XLA cannot average over ranks; compile the model or function with jit_compile=False")

    def means(*values: np.ndarray) -> list[np.ndarray]:
        there = dict(zip(present, values))
        found = _means_of_values(op, [there.get(i) for i in range(len(grads))], paths, comm)
        return [found[i].astype(value.dtype) for i, value in there.items()]

    tensors = tf.numpy_function(means, [grads[i] for i in present], [grads[i].dtype for i in present], name="mean")
    for i, tensor in zip(present, tensors):
        grads[i] = tf.ensure_shape(tensor, grads[i].shape)
    return grads


def _means_of_values(op: str, grads: list[Any], paths: list[str], comm: Comm) -> list[Any]:
    """The mean of each gradient over the ranks, for arrays and for tensors that have values, of any framework."""
    copies: dict[str, Any] = dict.fromkeys(itertools.starmap(weight_name, enumerate(paths)))
    for name, grad in zip(copies, grads):
        if grad is not None:  # a dtype that NumPy lacks is averaged in float32
            copies[name] = np.array(as_numbers(adapter_for(grad).to_array(grad, numbers=True)), order="C")
    with _turn:
        found: Any = average(op, lambda: copies, comm=comm).values()
    return [None if g is None else adapter_for(g).from_numbers(mean, g) for mean, g in zip(found, grads)]


def _variables(tf: Any, params: Sequence[Any]) -> list[Any]:
    """TensorFlow's variables; a variable of Keras holds one."""
    return [param if isinstance(param, tf.Variable) else param.value for param in params]


MpiAdamOptimizer: Any  # a class, which derives from one of TensorFlow

if not TYPE_CHECKING:  # else a type checker accepts every misspelt name
    __getattr__ = _made_when_first_used
