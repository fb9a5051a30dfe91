"""Evaluations beside training, in a process of its own, which rank 0 starts.

It gets the policy, with the observation scale and the run's counters, as one version of `weight_sync`, plays the newest
one, and then the one that is the newest by then. It returns each result with the policy that it belongs to: bytes of
safetensors through a pipe. The episodes are those of `collect.Evaluator`, and so are the results' bits.
"""

import atexit
import contextlib
import multiprocessing
import os
import signal
import sys
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from safetensors.numpy import load, save

import mpi_util
from mpi_util_weight_sync import MultiProcessWeightSyncScheme
from policies.actor import Spec
from policies.forked import LIBC, PR_SET_PDEATHSIG, STOPS
from policies.scaler import scaler_for
from trainer.collect import RESULT, episodes_of, play
from trainer.config import Config
from trainer.control import STOP, Control
from trainer.environment import make_env
from trainer.rollout import Runner, networks

LOOK_S = 0.1  # between two looks for a stop, where rank 0 waits
DEATHS = 2  # of the process, one after the other without a result between them, that end the run


class Beside:
    """Evaluates beside training; on rank 0, which waits for nothing but, when the run ends, for the last result."""

    def __init__(self, run: Any, asked: dict[str, np.ndarray]):
        """Starts the process.

        Args: run: trainer.run.Run, which imports this module. asked: the newest of `run.weights` that are to be
            evaluated, until their result is there; {}: none.
        """
        self.run, self.asked, self._deaths = run, asked, 0
        self._start()

    def _start(self) -> None:
        self._scheme = MultiProcessWeightSyncScheme(sync=False, timeout=None)
        self._scheme.init_on_sender(model_id="policy", weights=self.run.weights, num_workers=1)
        self._results, results = multiprocessing.Pipe(duplex=False)
        arguments = self._scheme, results, self.run.config, self.run.spec
        self._process = multiprocessing.get_context("spawn").Process(target=_evaluate, args=arguments)
        safe = os.environ.get("PYTHONSAFEPATH", "")
        os.environ["PYTHONSAFEPATH"] = "1"  # or a file of the current folder could take the place of multiprocessing
        resource_tracker.ensure_running()  # or `start` does, which unblocks signals
        before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)  # what stops the run is rank 0's to handle
        try:
            self._process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            os.environ["PYTHONSAFEPATH"] = safe
        results.close()
        atexit.register(self._process.kill)
        if self.asked:
            self._send()

    def _send(self) -> None:
        with contextlib.suppress(mpi_util.WorkerLeftError):  # which `_result` notices too
            if self._scheme.version:
                self._scheme.send(self.asked)
            else:
                self._scheme.connect(weights=self.asked)

    def evaluate(self) -> dict[str, np.ndarray]:
        """Asks for an evaluation of the current weights, if one is due.

        Returns: as Evaluator.evaluate, with `iteration`, int64 (1,), and the policy's arrays: what has come since, of
            an earlier iteration; when the run ends, of this one. {}: nothing.
        """
        control = self.run.control
        if control.evaluate:
            control.evaluate = 0
            self.asked |= {name: array.copy() for name, array in self.run.weights.items()}
            self._send()
        ends = control.stop == STOP
        while found := self._result(ends):
            if not (ends and self.asked):
                return found
            self.run.report_late(found)
        return {}

    def _result(self, wait: bool) -> dict[str, np.ndarray]:
        """The next result; {}: none, or the run was stopped while it waited."""
        while self.asked and not (wait and self.run.stop):
            alive = self._process.is_alive()  # asked first: what it has sent until then is there
            try:
                found = load(self._results.recv_bytes()) if self._results.poll(LOOK_S * wait) else {}
            except (EOFError, OSError):
                found, alive = {}, False
            if "error" in found:
                mpi_util.fail(f"train.py: {found['error'].tobytes().decode()}")
            if found:
                self._deaths = 0
                if found["iteration"] == self.asked["iteration"]:
                    self.asked.clear()
                return found
            if not alive:
                self._start_again()
            elif not wait:
                break
        return {}

    def _start_again(self) -> None:
        self._process.join()
        self._scheme.shutdown()
        self._deaths += 1
        code = self._process.exitcode or 0
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"has ended with status {code}"
        if self._deaths == DEATHS:
            mpi_util.fail(f"train.py: the process that evaluates {how}, {DEATHS} times without a result")
        iteration = int(self.asked["iteration"][0])
        print(f"train.py: the process that evaluates {how}; a new one evaluates iteration {iteration}", file=sys.stderr)
        self._start()


def _evaluate(scheme: MultiProcessWeightSyncScheme, results: Connection, config: Config, spec: Spec) -> None:
    """The process beside training: returns a result, or an error and then no more, for each version that it takes."""
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    scaler, control = scaler_for(spec), Control(config.first_rew_scale)
    try:
        env = make_env(config, quiet=True)
        actor = networks(spec).Actor(spec, networks(spec).init_params(spec, np.random.default_rng()))
        runner = Runner(env, actor, scaler, config, control, training=False, greedy=True)
        policy = actor.params | scaler.arrays
        scheme.init_on_receiver(model_id="policy", worker_idx=0, model=policy | control.arrays)
        scheme.connect(background=False)
        while not scheme.ended:
            actor.refresh()
            batches: Any = [play(runner, "evaluate", key) for key in episodes_of(runner)]
            found = {name: np.concatenate([batch[name] for batch in batches]) for name in RESULT}
            results.send_bytes(save(found | policy | {"iteration": control.arrays["iteration"]}))
            scheme.receive()
    except mpi_util.WorkerLeftError:  # the run has ended
        return
    except Exception as error:
        line = " ".join(f"evaluation of iteration {control.iteration}: {type(error).__name__}: {error}".split())
        results.send_bytes(save({"error": np.frombuffer(line.encode(), np.uint8)}))
