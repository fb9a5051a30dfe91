"""Whether an environment repeats an episode: what `check_replay` needs of it, what it finds, and what it leaves."""

import random

import numpy as np
import pytest

import mpi_util


class Space:
    def seed(self, seed):
        self.rng = np.random.default_rng(seed)

    def sample(self):
        return self.rng.normal()


class Env:
    """Has what `check_replay` needs and no more. Args: fault: what the observation after the first step depends on."""

    action_space = Space()
    resets, made, closed = 0, 0, 0

    def __init__(self, fault=""):
        self.fault, self.own = fault, np.random.default_rng()
        Env.made += 1
        self.number, self.t = Env.made, 0

    def reset(self, seed):
        self.rng, self.resets, self.t = np.random.default_rng(seed), self.resets + 1, 0
        return {"at": self.rng.normal(size=2)}, {"resets": self.resets}  # what is not compared: infos

    def step(self, action):
        self.t += 1
        faults = {
            "resets": self.resets, "late resets": max(self.resets, 8), "number": self.number, "own": self.own.normal(),
            "global": np.random.normal(), "python": random.random(),
        }  # fmt: skip
        if self.fault == "raises":
            raise ArithmeticError("it fell over")
        obs = {"at": self.rng.normal(size=2) + action, "more": [np.float32(self.t), [faults.get(self.fault)]]}
        return obs, 1.0, self.t == 20, False, {"resets": self.resets}

    def close(self):
        Env.closed += 1


USED = r"a used environment plays the same episode differently from step 1 on: it keeps something over reset; (.*)"
NEW = r"a second new environment plays the same .* from step 1 on: what is random in it must come from reset\(seed=\)"


@pytest.mark.parametrize("fault", ["", "resets", "late resets", "number", "own", "global", "python", "raises"])
def test_an_environment_repeats_an_episode_or_the_error_says_what_to_do(fault):
    states = [random.getstate(), np.random.get_state()[1].tolist()]
    Env.made = Env.closed = 0
    if not fault:
        mpi_util.check_replay(Env)
    elif fault == "raises":
        with pytest.raises(ArithmeticError):
            mpi_util.check_replay(lambda: Env(fault))
    else:
        of_used = "resets" in fault
        with pytest.raises(mpi_util.MpiUtilError, match=USED if of_used else NEW) as caught:
            mpi_util.check_replay(lambda: Env(fault), seed=7, n_steps=5, **{"fix": "mend it"} if of_used else {})
        assert str(caught.value).endswith("mend it") == of_used
    assert Env.closed == Env.made == 2 - (fault == "raises")
    assert [random.getstate(), np.random.get_state()[1].tolist()] == states
    assert not vars(Env.action_space)
