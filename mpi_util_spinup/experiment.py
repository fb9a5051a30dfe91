"""Experiments, started by the user's process: a function with its arguments runs on N ranks; several at once."""

import contextlib
import ctypes
import hashlib
import inspect
import json
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

from mpi_util import MpiUtilError, UsageError, mpi_fork, usable_cores
from mpi_util.arrays.adapters import framework
from mpi_util.errors import whole_number
from mpi_util.ranks import failure
from mpi_util.ranks.identity import under_launcher

from .files import read, regular, replace_file
from .plot import last_return
from .serialization_utils import convert_json
from .table import say

DEFAULT_DATA_DIR = "data"  # in the current directory
_MARKER = "finished.json"
# What the subprocess runs. sys.path is set first: this package need not be installed, and a file of the current
# directory is not to be imported in place of importlib.
_START = "import sys; _, module, job, *sys.path[:] = sys.argv; import importlib; "
_START += "importlib.import_module(module).run_packed(job)"
_POLL_S = 0.05
_GRACE_S = 10.0  # time to save its work for a run that is asked to stop
_LAST_GRACE_S = 3.0  # after it was asked again
_TAIL_BYTES, _TAIL_LINES, _SHORT_TAIL, _PR_SET_PDEATHSIG = 1 << 16, 60, 15, 1

Thunk = Callable[..., object]


class Result(NamedTuple):
    name: str  # with its seed
    status: str  # "done", "done before", "failed", "stopped" (by a signal to this process) or "not run"
    code: int | None  # exit status, negative for a signal; None if it was not run now, or could not be started
    seconds: float  # how long it ran
    folder: Path  # of its results


class ExperimentError(MpiUtilError):
    """Experiments have failed; the others have run. Its `results` are those of all of them."""

    results: list[Result]


def setup_logger_kwargs(
    exp_name: str, seed: int | None = None, data_dir: str | os.PathLike[str] | None = None, datestamp: bool = False
) -> dict[str, str]:
    """The arguments of a logger that name the folder of a run, {"output_dir": ..., "exp_name": exp_name}.

    It is data_dir/exp_name/exp_name_s<seed>; without a seed data_dir/exp_name; with {seed} in it data_dir itself; None:
    `data` here. A datestamp makes a new one: data_dir/YYYY-MM-DD_exp_name/YYYY-MM-DD_hh-mm-ss-exp_name_s<seed>.
    """
    if "{seed}" in str(data_dir):
        return {"output_dir": str(data_dir).replace("{seed}", str(seed)), "exp_name": exp_name}
    now = time.localtime()  # once, so that a midnight cannot come in between
    folder = Path(data_dir or DEFAULT_DATA_DIR, time.strftime("%Y-%m-%d_", now) * datestamp + exp_name)
    if seed is not None:
        folder /= time.strftime("%Y-%m-%d_%H-%M-%S-", now) * datestamp + f"{exp_name}_s{seed}"
    return {"output_dir": str(folder), "exp_name": exp_name}


class Experiment:
    """A run that can be started and stopped. A file in its folder says when it has succeeded.

    Its `config` is everything that it depends on, as JSON. `output` is the file to which it prints; None: it prints
    where this process does.
    """

    def __init__(
        self, name: str, thunk: Thunk, num_cpu: int | str, where: dict[str, str], kwargs: dict[str, Any], at_once: int
    ):
        """Pickles the function and its arguments. Raises UsageError: that fails; a bad `num_cpu`; this is a rank.

        Args: where: as from `setup_logger_kwargs`. at_once: number of runs that share the machine.
        """
        if under_launcher():
            raise UsageError("experiments start their own ranks; run this script without mpiexec or srun")
        cores = max(1, usable_cores() // at_once)
        self.num_cpu = whole_number("num_cpu, if not 'auto',", cores if num_cpu == "auto" else num_cpu, 1)
        where = kwargs.pop("logger_kwargs", where)
        self.config = convert_json(kwargs | {"exp_name": name, "thunk": thunk, "num_cpu": self.num_cpu})
        self.folder = Path(where.get("output_dir") or ".")
        self.name = self.folder.name if "output_dir" in where else name
        functions = thunk, *filter(callable, kwargs.values())
        self._mark = {"config": self.config, "source": "".join(map(_source_of, functions))}
        cloudpickle = framework("cloudpickle")  # which also takes lambdas, closures and the script's own functions
        registry = {} if "gym" in sys.modules else getattr(sys.modules.get("gymnasium"), "registry", {})
        if spec := registry.get(str(kwargs.get("env_name"))):
            kwargs |= {"env_name": spec}  # the script may have registered it, and ranks do not run the script
        try:
            self._packed: bytes = cloudpickle.dumps((thunk, kwargs | {"logger_kwargs": where}))
        except Exception as error:  # of whatever object
            what = "cannot pickle the function and arguments of an experiment for another process"
            raise UsageError(f"{what} ({error}); define the function in a module of its own") from None
        self.output = self.folder / "output.txt" if at_once > 1 else None
        self._environment = {"MPI_UTIL_CORES": str(cores)} if at_once > 1 else {}
        self.seconds = 0.0

    def finished(self) -> bool:
        """True if a run with the same configuration and function has succeeded in the folder."""
        with contextlib.suppress(OSError, ValueError, TypeError):  # there is none, or half of one
            return bool(json.loads(read(self.folder / _MARKER)) == self._mark)
        return False

    def start(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / _MARKER).unlink(missing_ok=True)
        fd, self._job = tempfile.mkstemp(".job", ".", self.folder.absolute())  # there the ranks of all hosts read it
        with open(fd, "wb") as file_of_job:
            file_of_job.write(pickle.dumps((self.num_cpu, sys.argv, self._packed)))
        path = [os.path.abspath(entry) for entry in sys.path if isinstance(entry, str)]
        self._began = time.monotonic()
        with open(self.output, "ab", opener=regular) if self.output else contextlib.nullcontext() as file:
            # in a session of its own, so that a terminal's Ctrl-C does not reach it: the schedule forwards signals
            self._process = subprocess.Popen(  # noqa: S603  # this interpreter
                [sys.executable, "-c", _START, __name__, self._job, *path], start_new_session=True,
                stdin=subprocess.DEVNULL, stdout=file, stderr=file and subprocess.STDOUT,
                env=os.environ | self._environment,
            )  # fmt: skip

    def poll(self) -> int | None:
        """The exit status of the run, negative for a signal; None while it is running."""
        if (code := self._process.poll()) is not None:
            self.seconds = time.monotonic() - self._began
            Path(self._job).unlink(missing_ok=True)
            if code == 0:
                with contextlib.suppress(OSError):  # the disk is full: the run will count as not finished
                    replace_file(self.folder / _MARKER, json.dumps(self._mark, indent=4).encode())
        return code

    def signal(self, signum: int) -> None:
        """Sends a signal; SIGKILL to all its processes."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signum) if signum == signal.SIGKILL else self._process.send_signal(signum)


class Schedule:
    """Runs experiments in order, and prints a line about each, and the last lines of a failed one's output file.

    The first signal asks the runs to end, the second asks again, the third kills; the second and third follow by
    themselves after a while, so one Ctrl-C is enough. Args: grid: for `ExperimentGrid`, whose `run` says what follows.
    """

    def __init__(self, experiments: list[Experiment], max_parallel: int = 1, grid: bool = False, redo: bool = False):
        self._redo = redo
        self._results = {e: Result(e.name, "not run", None, 0.0, e.folder) for e in experiments}
        self._waiting, self._running = deque(experiments), list[Experiment]()
        self._max_parallel, self._grid = max_parallel, grid
        self._signum = 0  # which stopped them
        self._due: deque[tuple[float, int]] = deque()  # (latest time, signal to send)

    def run(self) -> list[Result]:
        """A Result for each experiment. Raises: as `ExperimentGrid.run`, but no UsageError."""
        with contextlib.ExitStack() as handlers:
            if threading.current_thread() is threading.main_thread():
                for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                    if signal.getsignal(signum) is not signal.SIG_IGN:  # nohup
                        handlers.callback(signal.signal, signum, signal.signal(signum, self._receive))
            while self._running or (self._waiting and not self._signum):
                while self._waiting and len(self._running) < self._max_parallel and not self._signum:
                    self._start(self._waiting.popleft())
                self._collect()
                if self._due and time.monotonic() >= self._due[0][0]:
                    due = self._due.popleft()[1]
                    for experiment in self._running:
                        experiment.signal(due)
                if self._running:
                    time.sleep(_POLL_S)
        results = list(self._results.values())
        if self._grid:
            rows = [("run", "status", "seconds", "return", "folder")]
            for r in results:
                seconds = f"{r.seconds:.1f}" if r.seconds else ""
                rows.append((r.name, _status(r), seconds, last_return(r.folder), str(r.folder)))
            a, b, c, d, _ = (max(map(len, column)) for column in zip(*rows))
            say("\n" + "".join(f"{v:<{a}}  {w:<{b}}  {x:>{c}}  {y:>{d}}  {z}\n" for v, w, x, y, z in rows))
        if self._signum:
            raise SystemExit(128 + self._signum)
        if failed := [result for result in results if result.status == "failed"]:
            names, one = ", ".join(result.name for result in failed), f"failed with status {failed[0].code}"
            many = f"{len(failed)} of {len(results)} experiments failed: {names}"
            error = ExperimentError(many if self._grid else f"experiment {names} {one}")
            error.results = results
            raise error
        return results

    def _start(self, experiment: Experiment) -> None:
        if self._grid and not self._redo and experiment.finished():
            return self._end(experiment, "done before")
        where = f", prints to {experiment.output}" if experiment.output else ""
        n = f" on {experiment.num_cpu} processes" * (experiment.num_cpu != 1)
        say(f"{experiment.name}: started{n}{where}\n")
        try:
            experiment.start()
            self._running.append(experiment)
        except OSError as error:
            print(f"{experiment.name}: {error}", file=sys.stderr)
            self._end(experiment, "failed")

    def _collect(self) -> None:
        for experiment in list(self._running):
            if (code := experiment.poll()) is not None:
                self._running.remove(experiment)
                if code and not self._signum and experiment.output:
                    say(_tail(experiment.name, experiment.output))
                self._end(experiment, "done" if not code else "stopped" if self._signum else "failed", code)

    def _end(self, experiment: Experiment, status: str, code: int | None = None) -> None:
        self._results[experiment] = result = Result(
            experiment.name, status, code, experiment.seconds, experiment.folder
        )
        after = f" after {result.seconds:.1f} s" if result.seconds else f", in {result.folder}"
        say(f"{experiment.name}: {_status(result)}{after}\n")

    def _receive(self, signum: int, _frame: object) -> None:
        if not self._signum:
            self._signum, last = signum, time.monotonic() + _GRACE_S
            self._due.extend([(0.0, signum), (last, signum), (last + _LAST_GRACE_S, signal.SIGKILL)])
        elif self._due:
            self._due[0] = 0.0, self._due[0][1]


def _status(result: Result) -> str:
    return f"failed ({result.code})" if result.status == "failed" and result.code else result.status


def _tail(name: str, output: Path) -> str:
    """The last lines that a run printed, from the traceback on if there is one, each with the run's name."""
    with open(output, "rb", opener=regular) as file:
        file.seek(max(0, file.seek(0, 2) - _TAIL_BYTES))
        lines = file.read().decode(errors="replace").splitlines()
    last = max((i for i, line in enumerate(lines) if line.startswith("Traceback")), default=len(lines) - _SHORT_TAIL)
    return "".join(f"{name} | {line}\n" for line in lines[max(0, last - 1, len(lines) - _TAIL_LINES) :])


def _source_of(thunk: Thunk) -> str:
    """A digest of the function's source; "" if Python does not know it."""
    while isinstance(thunk, partial):
        thunk = thunk.func
    with contextlib.suppress(OSError, TypeError):
        return hashlib.sha256(inspect.getsource(thunk).encode()).hexdigest()
    return ""


def run_packed(path: str) -> None:
    """Runs the function, in the subprocess and in each of its ranks. path: of the file that `start` wrote."""
    failure.install()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # it ends when the process that started it does
    if not os.path.exists(path):
        raise UsageError(f"{path} is not on this host: experiments on several hosts need a data_dir that all share")
    # no other user can have written the file
    num_cpu, argv, packed = pickle.loads(read(Path(path), own=True))  # noqa: S301
    if mpi_fork(num_cpu) == "parent":
        sys.exit()
    sys.argv[:] = argv
    thunk, kwargs = pickle.loads(packed)  # noqa: S301
    if "env_name" in kwargs:
        old = "gym" in sys.modules and "gymnasium" not in sys.modules  # a program of that time, such as Spinning Up
        env = kwargs.pop("env_name")
        kwargs["env_fn"] = made = cast(Any, partial(_make_gym_env if old else framework("gymnasium").make, env))
        made.__name__ = str(getattr(env, "id", env))  # for config.json, and so the title of a plot
    thunk(**kwargs)


def _make_gym_env(name: str) -> Any:
    """An environment of OpenAI's gym in the API before 0.26, its last version, which has Gymnasium's."""
    gym: Any = sys.modules["gym"]
    known = inspect.signature(gym.make).parameters
    env = gym.make(name, **dict.fromkeys(known.keys() & {"disable_env_checker"}, True))  # which fails with NumPy 2
    if "apply_api_compatibility" in known:
        env = gym.wrappers.StepAPICompatibility(env, output_truncation_bool=False)
        reset = env.reset
        env.reset = lambda **settings: reset(**settings)[0]
    return env
