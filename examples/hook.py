"""A function for train.py that is called once an iteration: it sets the step size, adds a column, and ends the run.

    python train.py InvertedPendulum-v5 --nprocs 2 --lr_schedule constant --hook examples.hook:anneal

train.py calls it on process 0, with the row before it is written; `run` is trainer.hook.Hook.
"""

from trainer.hook import Hook


def anneal(run: Hook, row: dict[str, float]) -> None:
    """Halves the step sizes when the return has not risen for 10 iterations, and ends the run at the fourth time."""
    seen = run.state  # numbers, strings, lists: a checkpoint keeps them
    seen.setdefault("best", row["AverageEpRet"])
    seen["since"] = 0 if row["AverageEpRet"] > seen["best"] else seen.get("since", 0) + 1
    seen["best"] = max(seen["best"], row["AverageEpRet"])
    if seen["since"] == 10:
        seen["since"], seen["halved"] = 0, seen.get("halved", 0) + 1
        run.set(lr=run.config.lr / 2, vf_lr=run.config.vf_lr / 2)
    if seen.get("halved", 0) == 4:
        run.stop()
    row["BestEpRet"] = seen["best"]
