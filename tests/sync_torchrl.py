"""torchrl's own collectors on CartPole with the scheme as their weight-sync backend; imported by their workers too."""

import torch
from tensordict.nn import TensorDictModule
from torchrl import collectors
from torchrl.envs import GymEnv
from torchrl.weight_update import WeightSyncScheme

import mpi_util_weight_sync.torchrl  # noqa: F401
from mpi_util_weight_sync import MultiProcessWeightSyncScheme


class Chosen(torch.nn.Module):
    """Always takes the action that a buffer says: what a collector did shows which weights it had."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 2)
        self.tied = torch.nn.Linear(4, 2)
        self.tied.weight = self.layer.weight
        self.register_buffer("bias", torch.tensor([1.0, 0.0]))

    def forward(self, obs):
        scores = 0 * (self.layer(obs) + self.tied(obs)) + self.bias
        return torch.nn.functional.one_hot(scores.argmax(-1), 2)

    def choose(self, action: int) -> None:
        self.bias.zero_()[action] = 1.0


def make_env():
    return GymEnv("CartPole-v1")


def make_policy():
    return TensorDictModule(Chosen(), ["observation"], ["action"])


def actions(batch) -> set[int]:
    return set(batch["action"].argmax(-1).flatten().tolist())


def collect(kind: str) -> None:
    torch.set_num_threads(1)
    policy = make_policy()
    scheme = MultiProcessWeightSyncScheme(timeout=120)
    assert isinstance(WeightSyncScheme.from_backend("mpi_util", timeout=1), MultiProcessWeightSyncScheme)
    collector = getattr(collectors, kind)(
        [make_env] * 2, policy, frames_per_batch=40, total_frames=-1, weight_sync_schemes={"policy": scheme}
    )
    try:
        batches = iter(collector)
        assert actions(next(batches)) == {0}
        for action in (1, 0, 1):
            policy.module.choose(action)
            collector.update_policy_weights_()
            version = scheme.version
            assert scheme.versions == {0: version, 1: version}
            # an asynchronous collector had begun some with the weights before
            assert any(actions(next(batches)) == {action} for _ in range(40))
        collector.update_policy_weights_(policy.state_dict())
        collector.update_policy_weights_(policy, worker_ids=[1])
        assert scheme.versions == {0: 5, 1: 6}
    finally:
        collector.shutdown()
        scheme.shutdown()
