"""Normalisers that the ranks update apart, merged: against the statistics of all samples together."""

import copy
import pickle
from collections import namedtuple

import gymnasium as gym
import numpy as np
import torch
from harness import fork, raises, run_checks

import mpi_util

fork()


class Moments:
    """A running mean as programs write it, on any kind of numbers."""

    def __init__(self, make=np.asarray, shape=(2,)):
        self.make = make
        self.mean, self.var, self.count = make(np.zeros(shape)), make(np.ones(shape)), 0

    def update(self, x):
        total = self.count + len(x)
        delta = x.mean(0) - np.asarray(self.mean)
        m2 = np.asarray(self.var) * self.count + x.var(0) * len(x) + delta**2 * self.count * len(x) / total
        self.mean = self.make(np.asarray(self.mean) + delta * len(x) / total)
        self.var, self.count = self.make(m2 / total), total


Fixed = namedtuple("Fixed", "mean var count")


class Slots:
    __slots__ = ()
    mean = var = count = 1.0


def samples(rank, iteration):
    return np.random.default_rng([rank, iteration]).normal(1e3 * rank, 1 + iteration, (5 * rank + 3, 2))


def check_what_each_rank_adds_counts_once(comm, rank, size):
    for make in (np.asarray, torch.from_numpy):
        rms, seen = Moments(make), []
        for iteration in range(4):
            if iteration != 1:  # a round in which nobody adds anything changes nothing
                rms.update(samples(rank, iteration))
                seen += [samples(k, iteration) for k in range(size)]
            mpi_util.merge_moments({"obs": rms}, comm=comm)
            every = np.concatenate(seen)
            assert rms.count == len(every) and type(rms.count) is int and type(rms.mean) is type(make(every))
            assert np.allclose(rms.mean, every.mean(0)) and np.allclose(rms.var, every.var(0))
            assert len({digest(rms) for rms in mpi_util.rank0_gather(rms.__dict__ | {"make": 0}, comm=comm)}) == 1


def digest(state):
    return repr([np.asarray(state[key]).tolist() for key in ("mean", "var", "count")])


def check_what_all_begin_with_counts_once(comm, rank, size):
    rms = Moments()
    rms.update(samples(7, 7))  # as a resumed run has it
    mpi_util.merge_moments(rms, comm=comm)
    assert rms.count == len(samples(7, 7))
    rms.update(samples(rank, 0))
    mpi_util.merge_moments(rms, comm=comm)
    every = np.concatenate([samples(7, 7), *(samples(k, 0) for k in range(size))])
    assert rms.count == len(every) and np.allclose(rms.mean, every.mean(0)) and np.allclose(rms.var, every.var(0))
    rms.__init__()  # reset: what was there is forgotten
    rms.update(samples(rank, 1))
    mpi_util.merge_moments(rms, comm=comm)
    assert rms.count == sum(len(samples(k, 1)) for k in range(size))


def check_what_is_reset_or_copied_between_merges(comm, rank, size):
    rms = Moments()
    for iteration, n in enumerate([100, 100, 250]):  # as many samples as before, and more
        rms.__init__()
        rms.update(np.random.default_rng([iteration, rank]).normal(10 * iteration, 1, (n, 2)))
        mpi_util.merge_moments(rms, comm=comm)
        assert rms.count == n * size and abs(rms.mean - 10 * iteration).max() < 1 and (rms.var < 2).all()
    for _ in range(3):
        rms = pickle.loads(pickle.dumps(copy.deepcopy(rms)))
        rms.update(samples(rank, 0))
        mpi_util.merge_moments(rms, comm=comm)
    assert rms.count == 250 * size + 3 * sum(len(samples(k, 0)) for k in range(size))


def check_gymnasium(comm, rank, size):
    def make():
        env = gym.make("Pendulum-v1")
        return gym.wrappers.NormalizeReward(gym.wrappers.NormalizeObservation(env))

    for env in (make(), gym.vector.SyncVectorEnv([make, make])):
        env.reset(seed=rank)
        env.action_space.seed(rank)
        for _ in range(20 + rank):
            env.step(env.action_space.sample())
        mpi_util.merge_moments(env, comm=comm)
        inner = env.envs[-1] if hasattr(env, "envs") else env
        steps = sum(20 + k for k in range(size))
        assert steps <= inner.env.obs_rms.count < 2 * steps and inner.env.obs_rms.mean.shape == (3,)
        assert steps <= inner.return_rms.count < steps + 1
        one = [inner.env.obs_rms.mean, inner.env.obs_rms.var, inner.return_rms.mean, inner.return_rms.var]
        assert (
            len({repr([np.asarray(x).tolist() for x in state]) for state in mpi_util.rank0_gather(one, comm=comm)}) == 1
        )
        env.step(env.action_space.sample())  # and it goes on
        env.close()


def check_errors_reach_all(comm, rank, size):
    raises(mpi_util.BatchError, "no object with mean, var and count", lambda: mpi_util.merge_moments(3, comm=comm))
    odd = Moments(shape=(3,) if rank == size - 1 else (2,))
    if size > 1:
        raises(mpi_util.RankMismatchError, f"rank {size - 1}:", lambda: mpi_util.merge_moments(odd, comm=comm))
    loop, fixed = Moments(), Fixed(np.zeros(2), np.ones(2), 1)
    del loop.mean
    loop.env = loop
    for holder, text in [(loop, "no object"), (fixed, "takes no values")]:
        raises(mpi_util.BatchError, text, lambda holder=holder: mpi_util.merge_moments(holder, comm=comm))
    mpi_util.rank0_bcast_wts(mine := Moments(shape=(2,)), comm=comm)
    assert mine.mean.shape == (2,)
    raises(mpi_util.WeightsError, "merge_moments", lambda: mpi_util.rank0_bcast_wts(Slots(), comm=comm))


run_checks(globals())
