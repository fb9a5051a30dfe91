"""Evaluations beside training, in a process of its own, which rank 0 starts.

It is sent the policy, with the observation scale and the run's counters, plays, and returns the result with that
policy; what is the newest by then is the next one. All travels as bytes of safetensors through a pipe. The episodes are
those of `collect.Evaluator`, and so are the results' bits.
"""

import atexit
import multiprocessing
import os
import signal
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from safetensors.numpy import load, save

import mpi_util
from policies.actor import Spec
from policies.forked import LIBC, PR_SET_PDEATHSIG, STOPS
from policies.scaler import scaler_for
from trainer.collect import RESULT, episodes_of, play
from trainer.config import Config
from trainer.control import STOP, Control
from trainer.environment import make_env
from trainer.rollout import Runner, networks

LOOK_S = 0.1  # between two looks for a stop, where rank 0 waits


class Beside:
    """Evaluates beside training; on rank 0, which waits for nothing but, when the run ends, for the last result."""

    def __init__(self, run: Any, asked: dict[str, np.ndarray]):
        """Starts the process.

        Args: run: trainer.run.Run, which imports this module. asked: the newest of `run.weights` that are to be
            evaluated, until their result is there; {}: none.
        """
        self.run, self.asked, self._busy = run, asked, True  # as it starts
        self._pipe, other = multiprocessing.Pipe()
        arguments = other, run.config, run.spec
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
        other.close()
        atexit.register(self._process.kill)

    def evaluate(self) -> dict[str, np.ndarray]:
        """Asks for an evaluation of the current weights, if one is due.

        Returns: as Evaluator.evaluate, with `iteration`, int64 (1,), and the policy's arrays: what has come since, of
            an earlier iteration; when the run ends, of this one. {}: nothing.
        """
        control = self.run.control
        if control.evaluate:
            control.evaluate = 0
            self.asked |= {name: array.copy() for name, array in self.run.weights.items()}
        ends = control.stop == STOP
        while found := self._result(ends):
            if not (ends and self.asked):
                return found
            self.run.report_late(found)
        return {}

    def _result(self, wait: bool) -> dict[str, np.ndarray]:
        """The next result, after which the newest policy is sent; {}: none, or the run was stopped while it waited."""
        found: dict[str, np.ndarray] = {}
        try:
            while self.asked and not found and not (wait and self.run.stop):
                if self._busy and self._pipe.poll(LOOK_S * wait):
                    content, self._busy = self._pipe.recv_bytes(), False
                    found = load(content) if content else {}
                    if "error" in found:
                        mpi_util.fail(f"train.py: {found['error'].tobytes().decode()}")
                    if found and found["iteration"] == self.asked["iteration"]:
                        self.asked.clear()
                if self.asked and not self._busy:
                    self._pipe.send_bytes(save(self.asked))
                    self._busy = True
                if not wait:
                    break
        except (EOFError, OSError):
            self._process.join()
            code = self._process.exitcode or 0
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"has ended with status {code}"
            mpi_util.fail(f"train.py: the process that evaluates {how}; --resume evaluates that policy again")
        return found


def _evaluate(pipe: Connection, config: Config, spec: Spec) -> None:
    """The process beside training: returns a result, or an error and then no more, for each policy that it is sent."""
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    scaler, control = scaler_for(spec), Control()
    try:
        env = make_env(config, quiet=True)
        actor = networks(spec).Actor(spec, networks(spec).init_params(spec, np.random.default_rng()))
        runner = Runner(env, actor, scaler, config, control, training=False, greedy=True)
        policy = actor.params | scaler.arrays
        pipe.send_bytes(b"")  # from here on it takes what it is sent at once
        while True:
            for name, array in load(pipe.recv_bytes()).items():
                (policy | control.arrays)[name][...] = array
            actor.refresh()
            batches: Any = [play(runner, "evaluate", key) for key in episodes_of(runner)]
            found = {name: np.concatenate([batch[name] for batch in batches]) for name in RESULT}
            pipe.send_bytes(save(found | policy | {"iteration": control.arrays["iteration"]}))
    except (EOFError, ConnectionError):  # the run has ended
        return
    except Exception as error:
        line = " ".join(f"evaluation of iteration {control.iteration}: {type(error).__name__}: {error}".split())
        pipe.send_bytes(save({"error": np.frombuffer(line.encode(), np.uint8)}))
