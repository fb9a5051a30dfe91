"""mpi_util_spinup.mpi_tools: Spinning Up's names on 1 to 4 ranks under both MPIs, and the arithmetic of statistics."""

import os
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpi_util_spinup import mpi_tools


@pytest.mark.slow_unless(mpi="mpich", n=4)
@pytest.mark.parametrize(("mpi", "n"), [("mpich", 1), ("mpich", 2), ("mpich", 4), ("openmpi", 3)], indirect=["mpi"])
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
def test_more_bound_ranks_than_cores_share_them(run_ranks):
    n = len(os.sched_getaffinity(0)) + 1
    out = run_ranks("spinup_bound.py", min(n, 6), 7, status=7).out
    assert len(re.findall(r"on \[\d+", out)) == min(n, 6)


floats = st.floats(-1e6, 1e6)


@settings(deadline=None)
@given(st.lists(floats, max_size=24), st.sampled_from([0.0, 1e8]))
def test_statistics_are_exact(samples, offset):
    whole = np.array(samples, float) + offset
    merged = mpi_tools.statistics("a test", "x", whole)
    if not whole.size:
        assert np.isnan(merged[:4]).all() and merged.n == 0
        return
    exact = whole.astype(np.longdouble)
    assert np.allclose(merged.mean, float(exact.mean()), rtol=1e-14, atol=1e-8)
    assert np.allclose(merged.std, float(exact.std()), rtol=1e-8, atol=1e-6)
    assert (merged.min, merged.max) == (whole.min(), whole.max())
