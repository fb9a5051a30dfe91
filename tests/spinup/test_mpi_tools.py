"""mpi_util_spinup.mpi_tools: Spinning Up's names on 1 to 4 ranks under both MPIs, and the arithmetic of statistics."""

import functools
import importlib
import inspect
import os
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpi_util_spinup import mpi_tools


@pytest.mark.slow_unless(n=[2, 4])
@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_tools(run_ranks, n):
    out = run_ranks("spinup_tools.py", n).out
    assert "checks on" in out
    assert sorted(re.findall(r"^Message from (\d): all \t ready$", out, re.M)) == [str(k) for k in range(n)]


@pytest.mark.slow
def test_ranks_are_bound_to_a_core_each(run_ranks):
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        pytest.skip("one core")
    out = run_ranks("spinup_bound.py", 2, 0).out
    bound = dict(re.findall(r"rank (\d) of 2 on (\[.*\])", out))
    assert len(bound) == 2 and bound["0"] != bound["1"]
    assert all(len(found) < len(str(cores)) for found in bound.values())


@pytest.mark.slow
def test_more_bound_ranks_than_cores_share_them_and_the_status_is_the_ranks_own(run_ranks):
    n = len(os.sched_getaffinity(0)) + 1
    out = run_ranks("spinup_bound.py", min(n, 6), 7, status=7).out
    assert len(re.findall(r"on \[\d+", out)) == min(n, 6)


SPINNING_UP = {
    "mpi_tools.mpi_fork": "n bind_to_core",
    "mpi_tools.msg": "m string",
    "mpi_tools.proc_id": "",
    "mpi_tools.num_procs": "",
    "mpi_tools.broadcast": "x root",
    "mpi_tools.mpi_sum": "x",
    "mpi_tools.mpi_avg": "x",
    "mpi_tools.mpi_statistics_scalar": "x with_min_and_max",
    "logx.colorize": "string color bold highlight",
    "logx.restore_tf_graph": "sess fpath",
    "logx.Logger": "output_dir output_fname exp_name",
    "logx.Logger.log": "self msg color",
    "logx.Logger.save_config": "self config",
    "logx.Logger.save_state": "self state_dict itr",
    "logx.Logger.setup_tf_saver": "self sess inputs outputs",
    "logx.Logger.setup_pytorch_saver": "self what_to_save",
    "logx.Logger.log_tabular": "self key val",
    "logx.EpochLogger.store": "self",
    "logx.EpochLogger.log_tabular": "self key val with_min_and_max average_only",
    "logx.EpochLogger.dump_tabular": "self",
    "logx.EpochLogger.get_stats": "self key",
    "run_utils.setup_logger_kwargs": "exp_name seed data_dir datestamp",
    "run_utils.call_experiment": "exp_name thunk seed num_cpu data_dir datestamp",
    "run_utils.valid_str": "v",
    "run_utils.ExperimentGrid": "name",
    "run_utils.ExperimentGrid.add": "self key vals shorthand in_name",
    "run_utils.ExperimentGrid.variant_name": "self variant",
    "run_utils.ExperimentGrid.variants": "self",
    "run_utils.ExperimentGrid.print": "self",
    "run_utils.ExperimentGrid.run": "self thunk num_cpu data_dir datestamp",
    "serialization_utils.convert_json": "obj",
}


@pytest.mark.parametrize("name", SPINNING_UP)
def test_names_and_arguments_are_spinning_ups(name):
    module, *path = name.split(".")
    function = functools.reduce(getattr, path, importlib.import_module(f"mpi_util_spinup.{module}"))
    parameters = inspect.signature(function).parameters.values()
    asked = SPINNING_UP[name].split()
    positional = [p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert [p.name for p in positional][: len(asked)] == asked
    assert all(p.default is not p.empty for p in positional[len(asked) :])  # what is new is optional


floats = st.floats(-1e6, 1e6)


@settings(deadline=None)
@given(st.lists(st.lists(floats, max_size=6), min_size=1, max_size=4), st.sampled_from([0.0, 1e8]))
def test_merged_moments_are_those_of_all_samples_together(parts, offset):
    parts = [np.array(part, float) + offset for part in parts]
    merged = mpi_tools._merged([mpi_tools._summary("x", part) for part in parts])
    whole = np.concatenate(parts)
    if not whole.size:
        assert np.isnan(merged[:4]).all() and merged.n == 0
        return
    exact = whole.astype(np.longdouble)
    assert np.allclose(merged.mean, float(exact.mean()), rtol=1e-14, atol=1e-8)
    assert np.allclose(merged.std, float(exact.std()), rtol=1e-8, atol=1e-6)
    assert (merged.min, merged.max) == (whole.min(), whole.max())
