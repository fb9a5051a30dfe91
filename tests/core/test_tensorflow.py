"""TensorFlow and Keras: weights, tensors, averaged gradients, sessions, threads and the GPU's memory."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
from conftest import ROOT

import mpi_util
from mpi_util.arrays.adapters import tensorflow_setup
from mpi_util_spinup import mpi_tf

QUIET = {"TF_CPP_MIN_LOG_LEVEL": "3"}


@pytest.mark.tensorflow
@pytest.mark.parametrize(("mpi", "n"), [("mpich", 3), ("openmpi", 2)], indirect=["mpi"])
def test_tensorflow(run_ranks, n):
    assert "checks on" in run_ranks("tf_all.py", n, timeout=240, env=QUIET).out


@pytest.mark.tensorflow
@pytest.mark.torch
@pytest.mark.parametrize("mpi", ["mpich"], indirect=True)
def test_keras_on_torch(run_ranks):
    assert "in order" in run_ranks("tf_keras_torch.py", 2, timeout=120).out


@pytest.mark.parametrize(
    ("code", "line"),
    [
        ("mpi_tf.flat_concat([])", "TensorFlow, which is not installed: pip install tensorflow"),
        ("mpi_tf.MpiAdamOptimizer", "TensorFlow, which is not installed: pip install tensorflow"),
        ("mpi_util.tf_config", "TensorFlow, which is not installed: pip install tensorflow"),
        ("mpi_util.setup_tensorflow_for_mpi()", "TensorFlow, which is not installed: pip install tensorflow"),
        ("mpi_tf.average_gradients('adam')", "Keras, which is not installed: pip install tensorflow"),
    ],
)
def test_without_the_framework_one_line_says_so(code, line):
    blocked = "import sys; sys.modules |= dict.fromkeys(['tensorflow', 'keras'])"
    program = f"{blocked}\nimport mpi_util\nfrom mpi_util_spinup import mpi_tf\n{code}"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode and done.stderr.splitlines()[-1].endswith(f"MissingFrameworkError: this needs {line}")
    assert mpi_util.MissingFrameworkError.status == 2


def test_without_tensorflow_what_needs_it_is_no_attribute(monkeypatch):
    for name in ("tensorflow", "keras"):
        monkeypatch.setitem(sys.modules, name, None)
    assert not hasattr(mpi_util, "tf_config") and not hasattr(mpi_tf, "MpiAdamOptimizer")


def test_mpi_tf_loads_no_framework():
    names = "{'tensorflow', 'keras', 'torch'}"
    program = f"import sys, mpi_util_spinup.mpi_tf, mpi_util.arrays.adapters; print(*{names} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "\n"


@pytest.mark.parametrize("variable", ["MPI_LOCALRANKID", "OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID"])
def test_ranks_of_a_machine_take_its_gpus_in_turn(monkeypatch, variable):
    for name in ("MPI_LOCALRANKID", "OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID"):
        monkeypatch.delenv(name, raising=False)

    def gpu_of(k):
        monkeypatch.setenv(variable, str(k))
        return tensorflow_setup.own_gpu(3)

    assert [gpu_of(k) for k in range(5)] == [0, 1, 2, 0, 1]


@pytest.mark.parametrize(
    ("share", "calls"),
    [
        (0.0, [("visible", ["gpu 1"], "GPU"), ("growth", "gpu 1", True)]),
        (0.5, [("visible", ["gpu 1"], "GPU"), ("logical", "gpu 1", [{"memory_limit": 4000}])]),
    ],
)
def test_a_rank_sees_its_own_gpu_with_growing_or_limited_memory(monkeypatch, share, calls):
    """TensorFlow's own calls are recorded: they refuse a machine without a GPU."""

    class Gpu(str):
        device_type = "GPU"

    made = []

    def record(name):
        return lambda *args: made.append((name, *args))

    config = SimpleNamespace(
        list_physical_devices=lambda kind: [Gpu("gpu 0"), Gpu("gpu 1")],
        set_visible_devices=record("visible"),
        set_logical_device_configuration=record("logical"),
        LogicalDeviceConfiguration=dict,
        experimental=SimpleNamespace(set_memory_growth=record("growth")),
        threading=SimpleNamespace(
            set_intra_op_parallelism_threads=lambda n: None, set_inter_op_parallelism_threads=lambda n: None
        ),
    )
    monkeypatch.setitem(sys.modules, "tensorflow", SimpleNamespace(config=config))
    monkeypatch.setattr(tensorflow_setup, "_gpu_memory_mb", lambda ordinal: 8000)
    monkeypatch.setenv("MPI_LOCALRANKID", "3")
    mpi_util.setup_tensorflow_for_mpi(share)
    assert made == calls


@pytest.mark.parametrize("share", [-0.1, 1.5])
def test_a_share_of_the_gpu_is_between_0_and_1(monkeypatch, share):
    with pytest.raises(mpi_util.UsageError, match="from 0"):
        mpi_util.setup_tensorflow_for_mpi(share)
    monkeypatch.setitem(os.environ, "MPI_UTIL_GPU_PCT", str(share))
    with pytest.raises(mpi_util.UsageError, match="from 0"):
        tensorflow_setup.gpu_share()
