"""The names and keywords of the mpi_util of 2017, by which its README's program runs unchanged."""

import inspect
import shutil
import subprocess
import sys

import numpy as np
import pytest
from conftest import ROOT

import mpi_util
import mpi_util.compat_2017 as of_2017

ARGUMENTS = {  # name -> its arguments in their order, with the defaults that programs may rely on; None: no function
    "mpi_fork": "n gpu_pct=0.0", "set_global_seeds": "", "accum_batches": "segs", "print0": "", "steps_sec": "",
    "mpitype": "typ", "rank0_accum_batches": "", "all_accum_batches": "", "all_sum": "x", "all_mean": "x",
    "bcast": "x", "pt_to_pt_bcast": "x", "set_wt": "sess graph var val", "rank0_bcast_wts": "", "all_avg_wts": "",
    "chksum": "", "rank0_bcast_wts_keras": "model", "chksum_keras": "model label", "timeit": "label",
    "rank": None, "nworkers": None,
}  # fmt: skip


@pytest.mark.parametrize("module", [mpi_util, of_2017], ids=["mpi_util", "compat_2017"])
@pytest.mark.parametrize("name", ARGUMENTS)
def test_the_name_is_there_with_its_arguments(module, name):
    thing, expected = getattr(module, name), ARGUMENTS[name]
    for word in (expected or "").split():
        argument, _, default = word.partition("=")
        known = inspect.signature(thing).parameters
        assert argument in known and (not default or str(known[argument].default) == default)


def test_keywords(capsys):
    assert of_2017.rank0_accum_batches(segins={"x": np.ones(2)})["x"].tolist() == [1, 1]
    assert of_2017.all_accum_batches(segs={"x": [np.ones(1)]})["x"] == [1]
    assert of_2017.steps_sec(stepcnt=10) > 0
    assert of_2017.chksum(sess={"w": np.ones(2)}) == of_2017.chksum({"w": np.ones(2)})
    model = {"w": np.ones(2)}
    assert of_2017.rank0_bcast_wts_keras(model, "inv") is None
    assert f"after chksum {of_2017.chksum_keras(model, 'after')}\n" in capsys.readouterr().out
    of_2017.set_global_seeds(i=3)
    first = np.random.rand()
    of_2017.set_global_seeds(seed=3)
    assert np.random.rand() == first
    x = np.arange(3.0)
    assert of_2017.pt_to_pt_bcast(x) is x
    with pytest.raises(TypeError, match="nix"):
        of_2017.steps_sec(nix=10)
    with pytest.raises(TypeError, match="segins"):
        mpi_util.rank0_accum_batches(segins={})  # not of today's mpi_util


def test_the_module_has_all_of_mpi_util():
    assert (of_2017.rank, of_2017.nworkers) == (0, 1)
    assert of_2017.share is mpi_util.share and of_2017.BatchError is mpi_util.BatchError
    assert not hasattr(of_2017, "nix")


@pytest.mark.parametrize("deleted", ["", "compat_2017.py arrays/adapters/tf1.py"], ids=["kept", "deleted"])
def test_the_names_are_loaded_when_read_and_may_be_deleted(tmp_path, deleted):
    folder = tmp_path / "copied" / "mpi_util"  # else what is installed stands in for what is deleted
    shutil.copytree(ROOT / "mpi_util", folder, ignore=shutil.ignore_patterns("__pycache__"))
    for name in deleted.split():
        (folder / name).unlink()
    code = "import sys; from copied import mpi_util; print('copied.mpi_util.compat_2017' in sys.modules, "
    code += "hasattr(mpi_util, 'set_wt'), mpi_util.rank0_accum_batches({'x': [1]}))"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.stdout == f"False {not deleted} {{'x': [1]}}\n", done.stderr
