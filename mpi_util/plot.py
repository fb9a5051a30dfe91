"""Spinning Up's plotter under its own name: `spinup.utils.plot` becomes `mpi_util.plot`."""

import sys

from .runs.plot import get_datasets, main, make_plots

__all__ = ["get_datasets", "main", "make_plots"]

if __name__ == "__main__":
    sys.exit(main())
