"""How many threads BLAS and torch have, in each rank's process: one; for rank 0's update of a large model, all cores.

docs/architecture.md says when, and docs/pitfalls.md why. A single rank does the same, because the number of threads can
change the last bit of a product. With `comm=` the part of the cores is fixed: the other ranks may work or sleep, and a
number that followed them would give other bits each time. What the user has set stays, also by torch.set_num_threads or
threadpoolctl; a value of 1 that was set before mpi_fork, or by threadpoolctl, looks like ours.
"""

import contextlib
import ctypes
import functools
import os
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from ..host.cores import UPDATE_THREADS, update_threads, usable_cores

_OMP = "OMP_NUM_THREADS"  # read by all the libraries that have no variable of their own set
_VARIABLES = (_OMP, "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")
TENSORFLOW = ("TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS")
_XLA = "NPROC"  # read by JAX at its first operation
_WAIT_POLICY = "OMP_WAIT_POLICY"
# How long torch's threads spin for each other. With the default, a step on 125 rows of a 2x64 network took 50 ms on two
# cores that had other work too; with this number it takes 3 ms there, and 0.8 instead of 0.6 ms on idle cores.
_SPIN_COUNT = "10000"
# Numbers in the largest array of a model that is worth several threads: a layer of 256 x 256. Smaller ones take 2 to 8
# times as long beside a process that keeps a core busy (benchmarks/results/threads.json).
_LARGE = 256 * 256
OURS = "MPI_UTIL_THREADS"  # lists the variables that this package has set; all others are the user's
# start of a library's file name -> start of its variable's name, and the names of its functions to get and set
_LIBRARIES = {
    "libscipy_openblas64_": ("OPENBLAS", "scipy_openblas_{}_num_threads64_"),
    "libscipy_openblas": ("OPENBLAS", "scipy_openblas_{}_num_threads"),
    "libopenblas64_": ("OPENBLAS", "openblas_{}_num_threads64_"),
    "libopenblas": ("OPENBLAS", "openblas_{}_num_threads"),
    "libblis": ("BLIS", "bli_thread_{}_num_threads"),
    "libmkl_rt": ("MKL", "MKL_{}_Num_Threads"),
}


def environment(given: Mapping[str, str]) -> dict[str, str]:
    """Variables that make a process's libraries start with one thread, without those that the user has set."""
    ours = given.get(OURS, "").split()
    users = {name for name in _VARIABLES if given.get(name) and name not in ours}
    mine = () if _OMP in users else [name for name in _VARIABLES if name not in users]
    spin = {} if _WAIT_POLICY in given else {"GOMP_SPINCOUNT": given.get("GOMP_SPINCOUNT", _SPIN_COUNT)}
    return dict.fromkeys(mine, "1") | {OURS: " ".join(mine)} | spin


class _Pool:
    """The threads of one library. Once someone else has changed their number, the number is the user's.

    Args: expected: the numbers with which the library may have started by itself; any other one is the user's.
    """

    def __init__(self, get: Callable[[], int], put: Callable[[int], None], expected: Iterable[int]):
        self.get, self.put, self.n = get, put, get()
        self.ours = self.n in expected

    def set(self, n: int) -> None:
        """Changes the number, unless it is the user's."""
        self.ours = self.ours and self.get() == self.n
        if self.ours:
            self.put(n)
            self.n = self.get()  # OpenBLAS has a maximum


class Threads:
    """The pools of this process, and whether they have one thread or all.

    Attributes:
        all_cores: True on rank 0 of a communicator from a gather to its next collective call: its others sleep.
        largest: on rank 0, numbers in the largest array of all models that have been sent; 0: none has been.
    """

    def __init__(self) -> None:
        self.all_cores, self._n = False, 1  # n: threads of each pool
        self.largest = self._most = self._n_modules = 0  # most: threads of rank 0 while it has all cores
        self._variables: list[str] = []  # that this package has set
        self.pools: dict[str, _Pool] = {}  # by library

    def start(self, is_root: bool, most: int = 0) -> None:
        """Gives each pool of a new rank one thread. Args: most: rank 0's `update_threads`; 0: this process's own."""
        started, self._most = self._most, update_threads()
        if started:
            return
        launched = OURS in os.environ
        mine = environment(os.environ)
        self._variables = mine[OURS].split()
        pools = dict(zip((_XLA, *TENSORFLOW), map(str, (n := most or self._most, n, self._most if is_root else 1))))
        os.environ.update(mine | {name: pools[name] for name in pools if name not in os.environ})
        # by itself a library starts with a thread for each processor, or for each core without its hyperthreads
        counts = {usable_cores(), os.cpu_count() or 1, len(os.sched_getaffinity(0))}
        self._find({1} if launched else {1, *counts, *(count // 2 for count in counts)})
        self._set()
        if "torch" not in sys.modules:
            sys.meta_path.insert(0, self)

    def switch(self, all_cores: bool, of_any_size: bool = False, part: tuple[int, int] = (1, 1)) -> None:
        """Args: of_any_size: of a model. part: how many ranks have gathered, of how many: as many of the cores."""
        n = self._most if all_cores else 1
        if all_cores and not os.environ.get(UPDATE_THREADS):
            small = 0 < self.largest < _LARGE and not of_any_size
            n = 1 if small else max(1, n * part[0] // part[1])
        if self._most and (all_cores, n) != (self.all_cores, self._n):
            self._find({self._n})
            self.all_cores, self._n = all_cores, n
            self._set()

    def _set(self) -> None:
        os.environ.update(dict.fromkeys(self._variables, str(self._n)))  # for libraries that are loaded from now on
        for pool in list(self.pools.values()):  # a copy: a thread may be importing torch
            pool.set(self._n)

    def _find(self, expected: set[int]) -> None:
        """Finds the libraries that were loaded since the last call. Only an import loads one."""
        if len(sys.modules) == self._n_modules:
            return
        self._n_modules = len(sys.modules)
        torch: Any = sys.modules.get("torch")
        if "torch" not in self.pools and not getattr(getattr(torch, "__spec__", None), "_initializing", False):
            self._find_torch(torch, expected)
        with contextlib.suppress(OSError), open("/proc/self/maps") as maps:
            paths = {line.split(None, 5)[5].rstrip() for line in maps if "/lib" in line}
            for path in sorted(paths - self.pools.keys()):
                start = next(filter(os.path.basename(path).startswith, _LIBRARIES), None)
                if start:
                    self._find_library(path, *_LIBRARIES[start], expected)

    def _find_library(self, path: str, name: str, functions: str, expected: set[int]) -> None:
        users = any(os.environ.get(each) and each not in self._variables for each in (f"{name}_NUM_THREADS", _OMP))
        with contextlib.suppress(OSError, AttributeError):  # a build of it with other names
            library, words = ctypes.CDLL(path), ("Get_Max", "Set") if name == "MKL" else ("get", "set")
            get, put = (getattr(library, functions.format(word)) for word in words)
            self.pools[path] = _Pool(get, put, set() if users else expected)

    def _find_torch(self, torch: Any, expected: set[int] | None = None) -> None:
        """Makes torch's threads one of the pools, until the program calls torch.set_num_threads."""
        if not all(hasattr(torch, name) for name in ("get_num_threads", "set_num_threads", "zeros")):  # not (yet) torch
            return
        # the first call of MKL's vector functions, which two threads must not make at once: docs/pitfalls.md
        torch.zeros(1, dtype=torch.float32, device="cpu").exp_()
        get, put = torch.get_num_threads, torch.set_num_threads
        free = {_OMP, "MKL_NUM_THREADS"} <= set(self._variables)
        pool = self.pools["torch"] = _Pool(get, put, (expected or {get()}) if free else set())

        @functools.wraps(put)
        def set_num_threads(n: int) -> None:
            nonlocal free
            put(n)
            if threading.current_thread() is not threading.main_thread():
                return  # each thread has a number of its own
            free = free and self.all_cores  # a number that is set while the others work is the user's, for good
            pool.ours = free and get() == pool.n  # a function that only measures something restores the number

        torch.set_num_threads = set_num_threads

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """As an entry of sys.meta_path: adds torch's pool as soon as torch has been imported."""
        others = (finder for finder in sys.meta_path if finder is not self and name == "torch")
        spec = next(filter(None, (finder.find_spec(name, path, target) for finder in others)), None)
        loader: Any = spec and spec.loader
        if loader is not None:
            execute = loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                self._find_torch(module)

            loader.exec_module = exec_module
        return spec
