"""How many threads a rank computes with: one, but one for every usable core while rank 0 works alone.

Ranks that collect side by side would start as many threads as there are cores, each of them. After a gather they sleep,
and rank 0 has the machine: from there to its next collective call NumPy's BLAS and torch may use every core. It is the
same with one rank, because the number of threads can change the last bit of a product. For the same reason a program
can fix rank 0's number, `mpi_fork(n, threads=4)`: then its bits do not depend on the machine's cores either. TensorFlow
cannot change the size of its pools once it runs: each rank's has as many threads for one operation as rank 0 has cores,
as their number decides how a product of a wide layer (from some 600 units on) is cut.

What the user has set stays: OMP_NUM_THREADS and the other variables, or a number that she gives to
torch.set_num_threads or threadpoolctl. (Not seen is what equals our own: 1, given to threadpoolctl or before mpi_fork.)
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

from ..host.cores import update_threads, usable_cores
from .state import process, state

_OMP = "OMP_NUM_THREADS"  # read by all the libraries that have no variable of their own set
_VARIABLES = (_OMP, "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")
TENSORFLOW = ("TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS")
_WAIT_POLICY = "OMP_WAIT_POLICY"
# How long torch's threads spin for each other. By default it is so long that beside other work, with two threads on two
# cores, a step on 125 rows of a 2x64 network took 50 ms; so it takes 3 ms there, and 0.8 instead of 0.6 ms undisturbed.
_SPIN_COUNT = "10000"
_OURS = "MPI_UTIL_THREADS"  # names the variables that we have set; the others are the user's
# how the name of a library's file begins -> of its own variable, and its functions: get, set
_LIBRARIES = {
    "libscipy_openblas64_": ("OPENBLAS", "scipy_openblas_{}_num_threads64_"),
    "libscipy_openblas": ("OPENBLAS", "scipy_openblas_{}_num_threads"),
    "libopenblas64_": ("OPENBLAS", "openblas_{}_num_threads64_"),
    "libopenblas": ("OPENBLAS", "openblas_{}_num_threads"),
    "libblis": ("BLIS", "bli_thread_{}_num_threads"),
    "libmkl_rt": ("MKL", "MKL_{}_Num_Threads"),
}


def environment(given: Mapping[str, str]) -> dict[str, str]:
    """What makes the libraries of a process start with one thread, as far as the user has not set it otherwise."""
    ours = given.get(_OURS, "").split()
    users = {name for name in _VARIABLES if given.get(name) and name not in ours}
    mine = () if _OMP in users else [name for name in _VARIABLES if name not in users]
    spin = {} if _WAIT_POLICY in given else {"GOMP_SPINCOUNT": given.get("GOMP_SPINCOUNT", _SPIN_COUNT)}
    return dict.fromkeys(mine, "1") | {_OURS: " ".join(mine)} | spin


class _Pool:
    """The threads of one library. They are the user's from when their number is not the one that it had here.

    Args: expected: the numbers with which it may have started; another one is the user's.
    """

    def __init__(self, get: Callable[[], int], put: Callable[[int], None], expected: Iterable[int]):
        self.get, self.put, self.n = get, put, get()
        self.ours = self.n in expected
        process.undo.callback(put, self.n)

    def set(self, n: int) -> None:
        """Changes the number, unless it is the user's."""
        self.ours = self.ours and self.get() == self.n
        if self.ours:
            self.put(n)
            self.n = self.get()  # OpenBLAS has a maximum


class _Threads:
    """What this process knows of its pools."""

    def __init__(self) -> None:
        self.alone = False  # True while rank 0 has all cores
        self._most = self._n_modules = 0  # most: of rank 0 alone
        self._variables: list[str] = []  # those that are ours
        self.pools: dict[str, _Pool] = {}  # by library

    def start(self, is_root: bool, most: int) -> None:
        started, self._most = self._most, update_threads()
        if started:
            return
        launched = _OURS in os.environ
        mine = environment(os.environ)
        self._variables = mine[_OURS].split()
        pools = dict(zip(TENSORFLOW, (str(most or self._most), str(self._most if is_root else 1))))
        process.set_environment(mine | {name: pools[name] for name in pools if name not in os.environ})
        # by themselves libraries start with a thread for each processor, or each but hyperthreads
        counts = {usable_cores(), os.cpu_count() or 1, len(os.sched_getaffinity(0))}
        self._find({1} if launched else {1, *counts, *(count // 2 for count in counts)})
        self._set(1)
        if "torch" not in sys.modules:
            sys.meta_path.insert(0, self)
            process.undo.callback(sys.meta_path.remove, self)

    def switch(self, alone: bool) -> None:
        """All threads (True), or one."""
        if self._most and alone != self.alone:
            self._find({self._most if self.alone else 1})
            self.alone = alone
            self._set(self._most if alone else 1)

    def _set(self, n: int) -> None:
        os.environ.update(dict.fromkeys(self._variables, str(n)))  # for what is loaded from now on
        for pool in list(self.pools.values()):  # a thread may just import torch
            pool.set(n)

    def _find(self, expected: set[int]) -> None:
        """Looks for libraries that have been loaded since the last time. Only an import loads one."""
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
        """From now on torch has the rank's number of threads, until the program calls torch.set_num_threads."""
        if not all(hasattr(torch, name) for name in ("get_num_threads", "set_num_threads", "zeros")):  # not (yet) torch
            return
        # MKL's vector functions note the kind of processor at their first call, in two stores: another thread that
        # calls one between them computes with 4 correct digits (github.com/pytorch/pytorch/issues/188792).
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
            free = free and self.alone  # what is set beside the other ranks is the user's, for good
            pool.ours = free and get() == pool.n  # what has only measured something gives back what it has found

        process.set(torch, "set_num_threads", set_num_threads)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """As an entry of sys.meta_path: has torch found as soon as it has been imported."""
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


def start(is_root: bool, most: int = 0) -> None:
    """This process becomes a rank: one thread in each pool. Args: most: rank 0's `update_threads`; 0: its own."""
    state(_Threads).start(is_root, most)


def alone() -> None:
    """Rank 0 has gathered, the others sleep: all cores."""
    state(_Threads).switch(True)


def beside() -> None:
    """Rank 0 works beside the others: one thread."""
    state(_Threads).switch(False)


def pools() -> dict[str, int]:
    """The threads of each library that this process has loaded, but for those that the user has set."""
    return {os.path.basename(path): pool.get() for path, pool in state(_Threads).pools.items() if pool.ours}


def fix_torch(n: int) -> None:
    """Gives torch `n` threads for good, but not more than the user's environment says."""
    ours = os.environ.get(_OURS, "").split()
    limits = [os.environ.get(name, "") for name in (_OMP, "MKL_NUM_THREADS") if name not in ours]
    sys.modules["torch"].set_num_threads(min([n, *(int(x) for x in limits if x.isdecimal() and int(x))]))
