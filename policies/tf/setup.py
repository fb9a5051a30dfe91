"""TensorFlow and Keras as the learners need them. Import both from here: some settings only work before the first
import, others only before the first operation."""

import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any


def _load() -> tuple[Any, Any]:
    quiet = nullcontext() if "TF_CPP_MIN_LOG_LEVEL" in os.environ else _no_stderr()
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")  # its kernels promise no order of summation
    os.environ["KERAS_BACKEND"] = "tensorflow"
    with quiet:
        import keras
        import tensorflow
    return tensorflow, keras


@contextmanager
def _no_stderr() -> Iterator[None]:
    """Drops what is written to file descriptor 2: the libraries print before they read their log level."""
    sys.stderr.flush()
    kept = os.dup(2)
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


tf, keras = _load()


def configure(threads: int) -> None:
    """Settings of the whole process: deterministic, full float32, a fixed number of threads of one operation.

    TensorFlow cannot change that after its first operation; then there is a warning.
    """
    tf.config.experimental.enable_op_determinism()
    tf.config.experimental.enable_tensor_float_32_execution(False)
    try:
        tf.config.threading.set_intra_op_parallelism_threads(threads)
        tf.config.threading.set_inter_op_parallelism_threads(1)
    except RuntimeError:
        found = tf.config.threading.get_intra_op_parallelism_threads()
        warnings.warn(f"TensorFlow already runs with {found} threads an operation instead of {threads}", stacklevel=2)


def device_name(device: str) -> str:
    """TensorFlow's name, such as "/GPU:0", of "gpu:0" or "cuda". RuntimeError: there is no such device; one line."""
    name = device.lower().replace("cuda", "gpu")
    known = {"cpu": "/CPU:0"} | {f"gpu:{i}": f"/GPU:{i}" for i in range(len(tf.config.list_physical_devices("GPU")))}
    full = {"cpu:0": "cpu", "gpu": "gpu:0"}.get(name, name)
    if full not in known:
        raise RuntimeError(f"TensorFlow has no such device here; it has: {', '.join(known)}")
    return known[full]
