"""What tests that launch ranks have in common: launchers, a clean environment, processes that are left."""

import os
import re

import psutil

TIMEOUT_S = 30.0
LAUNCHER_VARIABLES = re.compile(r"^(PMI|PMIX|OMPI|PRTE|MPI_UTIL|HYDRA|MPI_LOCAL)")
CLEAN_ENVIRONMENT = {name: value for name, value in os.environ.items() if not LAUNCHER_VARIABLES.match(name)}


def survivors(token: str) -> list[psutil.Process]:
    """Processes that were started with `token` in their environment."""
    found = []
    for process in psutil.process_iter():
        try:
            if token in process.environ().get("MPI_UTIL_TEST_TOKEN", "") and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found
