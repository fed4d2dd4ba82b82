# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 5. Validate on hardware
#
# A simulator is worth as much as its errors are known. `greenroom validate` runs the same policies twice on
# the same recorded routing: on your machine, with actual weights, copies and kernels, and in the simulator.
# Then it says how far apart the two are. This notebook reads the report of one machine, and runs a small
# validation of its own. It needs torch (`pip install -e ".[torch]"`); a GPU is not needed.

# %%
from pathlib import Path

import pandas as pd

import greenroom

pd.set_option("display.max_colwidth", None)

# %% [markdown]
# ## A report that is there
#
# `docs/validation/` has a folder for each machine on which this was run. `results.csv` is a row a run: the
# mean time of a decode step, measured and predicted, and the relative error. Rows marked as references are
# those from which the prediction knows the machine; they are not scored.

# %%
folder = Path(greenroom.__file__).parent / "docs" / "validation" / "xeon_2_cores"
results = pd.read_csv(folder / "results.csv")
scored = results[~results.is_reference]
scored[
    ["tier", "batch_size", "ratio", "policy", "measured_ns", "predicted_ns", "error", "noise"]
].head(8)

# %% [markdown]
# `validation.json` has the verdict: what was demanded, what was found.

# %%
report = pd.read_json(folder / "validation.json", typ="series")
pd.DataFrame(report["verdict"])[["name", "rule", "words", "is_met"]]

# %% [markdown]
# And the errors by tier (where experts wait: host memory, a file, or behind an emulated link) and batch
# size:

# %%
pd.DataFrame(report["errors"])

# %% [markdown]
# Half of the runs on that machine are predicted within 4.1 %, and the worst one is 24 % off. What was on
# the machine, and what is real about it, stands in `report.md` there and in `docs/validation.md`: on a
# machine without a GPU the CPU is the device, and a bounded part of its memory the cache.
#
# ## A small one of your own
#
# The whole matrix takes 20 minutes on a quiet machine. A single block with two policies takes less than
# one, and shows how it goes; it is far too short to judge by. `settings` are those of `conf/validate.yaml`.

# %%
validated = greenroom.validate(
    tiers=["ram"],  # experts wait in host memory; "storage" reads them from a file
    policies=["on_demand", "static"],
    ratios=[0.25],
    batch_sizes=[1],
    steps=12,
    minutes=0.1,
    parity_steps=3,
    limit_steps=0,
    peer_tokens=0,
)
columns = [
    "policy",
    "is_reference",
    "measured_ns",
    "predicted_ns",
    "error",
    "noise",
    "counts_equal",
]
validated.table[columns]

# %% [markdown]
# Two kinds of agreement. *Decisions* must be identical, whatever the machine does: the same plans in
# lockstep, the same hits and bytes (`counts_equal`). *Times* are compared run by run; `noise` is the
# standard error of the measured over the predicted time, so an error of that size says nothing.

# %%
validated.verdict[["rule", "words", "is_met"]]

# %% [markdown]
# What cannot be judged is not met: two policies that differ by less than the noise have no rank. And a few
# steps on a machine that others use are no measurement. The report of the full matrix is the one to go by:
#
# ```sh
# greenroom validate --out outputs/my_machine
# ```
#
# ## On a GPU
#
# The same call; CUDA is found by itself (`device="cuda:1"` for another one). Copies then go over the card's
# link from locked memory, so leave out `tiers`' emulated `link`, and take experts of a real size:
#
# ```python
# greenroom.validate(
#     "model=qwen3_30b_a3b", tiers=["ram"], policies=["lru", "saem", "fiddler", "prefetch_next_gate"],
#     ratios=[0.125, 0.25], batch_sizes=[1, 8], dtype="bfloat16", minutes=20,
# )
# ```
#
# `make gpu` measures such a machine, writes its file and validates it in one go; `docs/cuda.md` says what
# that needs, and how far the CUDA side has been tested.
#
# Next: notebook 6 asks what two papers' claims look like from here.
