"""Writes models on rank 0: as their framework does, for Spinning Up's tools, and as weights that need no code to load.

A saver takes the model, the folder, and the iteration, or "" where saves replace each other. It may return a warning.
"""

import errno
import json
import pickle
import re
import warnings
import zipfile
from pathlib import Path
from typing import IO, Any

import numpy as np

from mpi_util.arrays import tree
from mpi_util.arrays.adapters import framework, numbers_of
from mpi_util.errors import UsageError

from .files import replace_file, replace_folder


def weights_of(model: Any) -> dict[str, np.ndarray]:
    """Weights by name, of torch modules and what else has a state_dict, Keras models, tensors, arrays and numbers.

    In a nested dict/list/tuple its keys precede the names, as in "pi/net.0.weight". Other objects are passed over.
    """
    found: dict[str, np.ndarray] = {}
    for path, leaf in tree.walk(model):
        if hasattr(leaf, "state_dict"):
            inner = weights_of(dict(leaf.state_dict()))
        elif hasattr(leaf, "weights") and hasattr(leaf, "get_weights"):  # Keras
            inner = {weight.path: np.asarray(weight) for weight in leaf.weights}
        else:
            array = numbers_of(leaf, "fciub")
            inner = {} if array is None else {"": array}
        found |= {"/".join(filter(None, (path, name))): array for name, array in inner.items()}
    return found


def load_weights(path: str | Path) -> dict[str, np.ndarray]:
    """The weights by name in a weights.npz; needs no framework, unpickles nothing. Raises UsageError: no such file."""
    try:
        with np.load(path, allow_pickle=False) as arrays:
            return {name: arrays[name] for name in arrays.files}
    except Exception as error:  # a damaged file raises a dozen kinds
        raise UsageError(f"cannot load weights from {path}: {' '.join(str(error).split())}") from None


def save_torch(what: Any, folder: Path, itr: str) -> str | None:
    """Writes pyt_save/model<itr>.pt, which holds whole objects, and pyt_save/weights<itr>.npz, which holds weights."""
    torch = framework("torch")
    place = folder / "pyt_save"
    place.mkdir(exist_ok=True)
    _save_weights(place / f"weights{itr}.npz", weights_of(what))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns that whole objects depend on the code that made them
            replace_file(place / f"model{itr}.pt", lambda file: torch.save(what, file))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        return f"Warning: could not pickle the model, only its weights are saved: {error}"
    except RuntimeError as error:  # torch's own for a file that could not be written
        raise (error.__context__ if isinstance(error.__context__, OSError) else error) from None
    return None


def save_keras(model: Any, folder: Path, itr: str) -> None:
    """Writes keras_save/model<itr>.keras and keras_save/weights<itr>.npz."""
    place = folder / "keras_save"
    place.mkdir(exist_ok=True)
    # Keras infers the format from the ending, and wants a path
    replace_file(place / f"model{itr}.keras", lambda file: model.save(file.name))
    _save_weights(place / f"weights{itr}.npz", weights_of(model))


def save_session(sess: Any, inputs: dict[str, Any], outputs: dict[str, Any], folder: Path, itr: str) -> None:
    """Writes tf1_save<itr>/: a SavedModel, the names of its inputs and outputs, and weights.npz."""

    def fill(draft: Path) -> None:
        v1 = framework("tensorflow").compat.v1
        with sess.graph.as_default():
            builder, key = v1.saved_model.Builder(str(draft)), v1.saved_model.DEFAULT_SERVING_SIGNATURE_DEF_KEY
            signatures = {key: v1.saved_model.predict_signature_def(inputs, outputs)}
            builder.add_meta_graph_and_variables(sess, [v1.saved_model.SERVING], signatures, clear_devices=True)
            builder.save()
            variables = v1.global_variables()
        kinds = ("inputs", inputs), ("outputs", outputs)
        names = {kind: {key: tensor.name for key, tensor in named.items()} for kind, named in kinds}
        (draft / "model_info.json").write_text(json.dumps(names))
        (draft / "model_info.pkl").write_bytes(pickle.dumps(names))  # where Spinning Up's tools look
        _save_weights(draft / "weights.npz", sess.run({variable.op.name: variable for variable in variables}))

    try:
        replace_folder(folder / f"tf1_save{itr}", fill)
    except framework("tensorflow").errors.OpError as error:
        found = re.search(rf"{re.escape(str(folder))}\S*; (.+)", error.message)  # the system's, about a file of ours
        raise OSError(errno.EIO, found[1], str(folder)) if found else error from None


def restore_tf_graph(sess: Any, fpath: str | Path, *, trust: bool = False) -> dict[str, Any]:
    """Loads what `Logger.save_state` wrote for a session, tf1_save<itr>, into a tf.compat.v1 session and its graph.

    A graph is a program, which may also read and write files when it is run: load your own.

    With `trust` it unpickles model_info.pkl, and so runs whatever code is in it, if there is no model_info.json, as in
    Spinning Up's folders; without it, that is a UsageError.
    Returns the tensors of the loaded graph, by the keys of the `inputs` and `outputs` of `setup_tf_saver`.
    """
    info = Path(fpath, "model_info.json")
    if not info.exists() and not trust:
        what = f"{fpath} has no model_info.json, and model_info.pkl is a pickle, which can run any code"
        raise UsageError(f"{what}; if the folder is your own: restore_tf_graph(..., trust=True)")
    saved_model = framework("tensorflow").compat.v1.saved_model
    text = (info if info.exists() else info.with_suffix(".pkl")).read_bytes()
    names = json.loads(text) if info.exists() else pickle.loads(text)  # noqa: S301  # the caller trusts it
    with sess.graph.as_default():
        saved_model.loader.load(sess, [saved_model.SERVING], str(fpath))
    return {key: sess.graph.get_tensor_by_name(name) for kind in names.values() for key, name in kind.items()}


def _save_weights(path: Path, weights: dict[str, np.ndarray]) -> None:
    """Writes NumPy's .npz without pickle: any names (`np.savez` refuses "file"), the same bytes for the same arrays."""

    def write(file: IO[bytes]) -> None:
        with zipfile.ZipFile(file, "w") as archive:
            for name, array in weights.items():
                with archive.open(zipfile.ZipInfo(f"{name}.npy"), "w", force_zip64=True) as entry:
                    np.lib.format.write_array(entry, np.asanyarray(array), allow_pickle=False)

    if weights:
        replace_file(path, write)
