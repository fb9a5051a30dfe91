"""A torchrl collector on each rank, which rank 0 feeds with weights."""

import sys
from pathlib import Path

from harness import fork

import mpi_util
from mpi_util_weight_sync import MPIWeightSyncScheme

fork()
sys.path.insert(0, str(Path(__file__).parent.parent))
import torch  # noqa: E402
from sync_torchrl import actions, make_env, make_policy  # noqa: E402
from torchrl.collectors import Collector  # noqa: E402

torch.set_num_threads(1)
policy = make_policy()
scheme = MPIWeightSyncScheme(timeout=120)
if mpi_util.rank == 0:
    scheme.init_on_sender(model_id="policy", model=policy)
    scheme.connect()
    for action in (1, 0):
        policy.module.choose(action)
        scheme.send()
        mpi_util.all_sum(0)
else:
    collector = Collector(make_env, policy, frames_per_batch=20, total_frames=-1)
    scheme.init_on_receiver(model_id="policy", context=collector)
    scheme.connect(background=False)
    batches = iter(collector)
    with scheme.frozen():
        assert actions(next(batches)) == {0}
    for action in (1, 0):
        assert scheme.receive()
        assert actions(next(batches)) == {action}
        mpi_util.all_sum(0)
    collector.shutdown()
scheme.shutdown()
mpi_util.print0("collected")
