"""One run of an experiment: a function with its arguments, on N ranks, in processes of its own."""

import contextlib
import importlib
import json
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from multiprocessing import spawn
from pathlib import Path
from typing import Any

from ..arrays.frameworks import framework
from ..collectives.start import mpi_fork
from ..errors import UsageError
from ..host.cores import usable_cores
from ..host.files import read_own, replace_file
from ..host.process import process
from ..launch import failure
from ..launch.identity import under_launcher
from .to_json import convert_json

_MARKER = "finished.json"
# What the subprocess runs. sys.path is set first: this package need not be installed.
# Without "", or a file of the current directory would be imported in place of json.
_START = "import sys; sys.path[:] = filter(None, sys.path); import importlib, json; "
_START += "sys.path[:] = json.loads(sys.argv[3]); "
_START += "importlib.import_module(sys.argv[1]).run_packed(sys.argv[2])"


Thunk = Callable[..., object]


class _Loading:
    now = False  # True while an experiment's process loads its function


def setup_logger_kwargs(
    exp_name: str, seed: int | None = None, data_dir: str | os.PathLike[str] | None = None, datestamp: bool = False
) -> dict[str, str]:
    """The arguments of a logger that name the folder of a run, {"output_dir": ..., "exp_name": exp_name}.

    It is data_dir/exp_name/exp_name_s<seed>; without a seed data_dir/exp_name; data_dir is `data` in the current
    directory if None. A datestamp makes a new one: data_dir/YYYY-MM-DD_exp_name/YYYY-MM-DD_hh-mm-ss-exp_name_s<seed>.
    """
    folder = Path(data_dir or "data", time.strftime("%Y-%m-%d_") * datestamp + exp_name)
    if seed is not None:
        folder /= time.strftime("%Y-%m-%d_%H-%M-%S-") * datestamp + f"{exp_name}_s{seed}"
    return {"output_dir": str(folder), "exp_name": exp_name}


class Experiment:
    """A run that can be started and stopped. A file in its folder says when it has succeeded.

    Attributes:
        name: of the run, with its seed. folder: of its results. seconds: how long it ran; 0 before it has ended.
        config: everything that it depends on, as JSON: a finished run with the same need not be repeated.
    """

    def __init__(
        self, name: str, thunk: Thunk, num_cpu: int | str, where: dict[str, str], kwargs: dict[str, Any], at_once: int
    ):
        """Pickles the function and its arguments. Raises UsageError: that fails, a bad `num_cpu`, or this is a rank.

        Args: where: as from `setup_logger_kwargs`. at_once: number of runs that share the machine.
        """
        if process.of(_Loading).now:
            raise UsageError("experiments import this script: put what starts them under `if __name__ == '__main__':`")
        if under_launcher():
            raise UsageError("experiments start their own ranks; run this script without mpiexec or srun")
        cores = max(1, usable_cores() // at_once)
        self.num_cpu = cores if num_cpu == "auto" else num_cpu
        if isinstance(self.num_cpu, bool) or not isinstance(self.num_cpu, int) or self.num_cpu < 1:
            raise UsageError(f"num_cpu must be a number of processes, at least 1, or 'auto'; got {num_cpu!r}")
        where = kwargs.pop("logger_kwargs", where)
        self.config = convert_json(kwargs | {"exp_name": name, "thunk": thunk, "num_cpu": self.num_cpu})
        self.folder = Path(where.get("output_dir") or ".")
        self.name = self.folder.name if "output_dir" in where else name
        self._packed = _pack(thunk, kwargs | {"logger_kwargs": where})
        self._environment = {"MPI_UTIL_CORES": str(cores)} if at_once > 1 else {}
        self.seconds = 0.0

    def finished(self) -> bool:
        """True if a run with the same configuration has succeeded in the folder."""
        try:
            return bool(json.loads((self.folder / _MARKER).read_text())["config"] == self.config)
        except (OSError, ValueError, KeyError, TypeError):
            return False

    def start(self, output: Path | None = None) -> None:
        """Starts the run. output: file to which its standard output and error are appended; None: those of here."""
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / _MARKER).unlink(missing_ok=True)
        # A file in memory: nothing is left of it however this process ends, and the run and its ranks end with it.
        self._job = os.fdopen(os.memfd_create("mpi_util-experiment"), "wb")
        os.fchmod(self._job.fileno(), 0o600)
        self._job.write(pickle.dumps((self.num_cpu, self._packed)))
        self._job.flush()
        path = json.dumps([os.path.abspath(entry) for entry in sys.path if isinstance(entry, str)])
        job = f"/proc/{os.getpid()}/fd/{self._job.fileno()}"
        self._began = time.monotonic()
        with open(output, "ab") if output else contextlib.nullcontext() as file:
            self._process = subprocess.Popen(  # noqa: S603  # this interpreter
                [sys.executable, "-c", _START, __name__, job, path],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file and subprocess.STDOUT,
                env=os.environ | self._environment,
                start_new_session=True,  # so that a terminal's Ctrl-C does not reach it: the schedule forwards signals
            )

    def poll(self) -> int | None:
        """The exit status of the run, negative for a signal; None while it is running."""
        if (code := self._process.poll()) is not None:
            self.seconds = time.monotonic() - self._began
            self._job.close()
            if code == 0:
                mark = {"config": self.config, "seconds": round(self.seconds, 3), "time": time.strftime("%F %T")}
                with contextlib.suppress(OSError):  # the disk is full: the run will count as not finished
                    replace_file(self.folder / _MARKER, json.dumps(mark, indent=4).encode())
        return code

    def signal(self, signum: int) -> None:
        """Sends a signal; SIGKILL to all its processes."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signum) if signum == signal.SIGKILL else self._process.send_signal(signum)


def _pack(thunk: Thunk, kwargs: dict[str, Any]) -> tuple[bytes, dict[str, Any]]:
    """(the pickled function and arguments, what `spawn.prepare` needs where they are loaded)."""
    found = spawn.get_preparation_data("experiment")
    arguments = {"sys_argv": found["sys_argv"]}
    hint = ", or pip install cloudpickle"
    # it may be missing; it also pickles the globals that a function of the script uses, which may be anything
    with contextlib.suppress(Exception):
        cloudpickle = importlib.import_module("cloudpickle")
        hint = ""
        return cloudpickle.dumps((thunk, kwargs)), arguments
    main = {key: found[key] for key in ("init_main_from_name", "init_main_from_path") if key in found}
    try:
        if getattr(thunk, "__module__", "") == "__main__" and not main:
            raise pickle.PicklingError(f"{thunk!r} is in no file")
        return pickle.dumps((thunk, kwargs)), arguments | main
    except Exception as error:  # of whatever object
        raise UsageError(
            f"cannot pickle the function and arguments of an experiment for another process ({error}); "
            f"define functions at the top of a module{hint}"
        ) from None


def run_packed(path: str) -> None:
    """Runs the function, in the subprocess and in each of its ranks. path: of the file that `start` wrote."""
    failure.install()
    failure.die_with_parent()
    # no other user can have written the file
    num_cpu, (packed, preparation) = pickle.loads(read_own(path))  # noqa: S301
    if mpi_fork(num_cpu) == "parent":
        sys.exit()
    process.of(_Loading).now = True
    spawn.prepare(preparation)
    thunk, kwargs = pickle.loads(packed)  # noqa: S301
    process.of(_Loading).now = False
    if "env_name" in kwargs:
        kwargs["env_fn"] = partial(framework("gymnasium").make, kwargs.pop("env_name"))
    thunk(**kwargs)
