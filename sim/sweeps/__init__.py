"""Sweeps of many runs: composed once a choice of groups, cut into chunks, run by an engine, resumable.

``arguments`` -> composer, space -> points -> chunks -> engine (pool, SLURM, Ray) -> run_chunk -> one
small JSON file a point -> one table. The coordinator holds no engine's detail, an engine no sweep's.
"""
