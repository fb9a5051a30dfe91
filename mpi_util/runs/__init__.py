"""Runs and experiments: loggers, savers, grids of experiments, behind `logx`, `run_utils` and `serialization_utils`.

May import `collectives` and what is below it; nothing below imports it. A program that uses none of those three names
may delete this folder. Read first: logger.py, experiment.py.
"""
