"""train.py, in which rank 0 gets SIGTERM at a given place: STOP_AT="evaluate 2" in an episode of the evaluation of
iteration 2, "update 2" before the update of iteration 2."""

import os
import signal
import sys
import time

import mpi_util
import train
from trainer.collect import Evaluator
from trainer.training import Training

PLACE, ITERATION = os.environ.get("STOP_AT", "nowhere 0").split()


def stopping(method):
    """The method; before it SIGTERM."""

    def stopped(*arguments, **keywords):
        signal.raise_signal(signal.SIGTERM)
        return method(*arguments, **keywords)

    return stopped


class StoppedEvaluator(Evaluator):
    def evaluate(self):
        if (PLACE, self.control.iteration) == ("evaluate", int(ITERATION)):
            run = self.runner.run
            # the others leave an episode to rank 0
            self.runner.run = stopping(run) if mpi_util.rank == 0 else lambda **how: time.sleep(0.5) or run(**how)
        return super().evaluate()


class StoppedTraining(Training):
    def learn(self, *arguments):
        if (mpi_util.rank, PLACE, self.control.iteration + 1) == (0, "update", int(ITERATION)):
            return stopping(super().learn)(*arguments)
        return super().learn(*arguments)


if __name__ == "__main__":
    sys.modules["trainer.run"].Evaluator = StoppedEvaluator
    sys.modules["trainer.training"].Training = StoppedTraining
    sys.exit(train.main())
