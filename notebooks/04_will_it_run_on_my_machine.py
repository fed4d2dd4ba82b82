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
# # 4. Will it run on my machine?
#
# Does the model fit, how fast will it be, what limits it, and what would help? `predict` answers from the
# figures of a model and of a machine, in closed form and in a second: no trace, no simulation, nothing to
# download. As commands: `greenroom predict`, `greenroom advise`, and `greenroom machines`, `greenroom
# model` for what there is.

# %%
import pandas as pd

import greenroom

pd.set_option("display.max_colwidth", None)

# %% [markdown]
# ## One question
#
# gpt-oss-120b on an RTX 4090 whose machine has 96 GiB of memory, under llama.cpp, with the experts of 24 of
# the 36 layers left to the CPU:

# %%
question = ["model=gpt_oss_120b", "machine=rtx4090", "engine=llama_cpp"]
found = greenroom.predict(*question, "placement.cpu_layers=24")
found

# %% [markdown]
# How to read it:
#
# - **The interval** comes from published speeds: how far off predictions of such rows were, each predicted
#   without knowing any row of its machine.
# - **The critical path** says where a token's time goes; the first line is the bottleneck.
# - **What it rests on** names figures of the machine that nobody has measured on it.
#
# All of it is data too:

# %%
pd.DataFrame(found.answer["decode_parts"])

# %% [markdown]
# ## What if?
#
# Any setting can be changed, by its name in the model's, the machine's or the engine's file. More layers on
# the GPU until they no longer fit, which the answer says instead of failing:

# %%
answers = {
    layers: greenroom.predict(*question, f"placement.cpu_layers={layers}")
    for layers in (36, 30, 24, 20)
}
pd.DataFrame(
    {
        "tokens/s": {layers: one.tokens_per_s for layers, one in answers.items()},
        "fits": {layers: one.fits for layers, one in answers.items()},
        "what is lacking": {
            layers: "; ".join(one.answer["problems"]) for layers, one in answers.items()
        },
    }
).rename_axis("layers on the CPU")

# %% [markdown]
# A part of the machine can be exchanged: `machine/gpu=rtx5090`, `machine/link=pcie5_x16`,
# `machine/cpu=...`. And `found.answer["gains"]` lists what each change would bring:

# %%
pd.DataFrame(found.answer["gains"])

# %% [markdown]
# ## What is best?
#
# `advise` tries engines, placements, cache sizes and, unless the model's own precision is at the floor
# already, quantisations; it keeps what fits.

# %%
advice = greenroom.advise("model=gpt_oss_120b", "machine=rtx4090")
columns = [
    "engine",
    "settings",
    "tokens_per_s",
    "gpu_bytes",
    "host_bytes",
    "fits",
    "published_rows",
]
advice.table.query("frontier")[columns]

# %%
advice.plot()

# %% [markdown]
# Look at `published_rows`: an engine without any is predicted from its description alone. The advice
# therefore also names the best of those that are held against published speeds:

# %%
held = advice.summary["best_held"]
print(held["engine"], held["settings"])
low, high = held["tokens_per_s_interval"]
print(f"{held['tokens_per_s']:.1f} tokens/s, 80% interval {low:.1f} to {high:.1f}")
print(held["limit"])

# %% [markdown]
# ## My own machine
#
# Take the nearest machine file and change what differs. This one has slower memory (40 GB/s instead of
# 68.6) and a link of PCIe 3:

# %%
mine = [
    "machine.cpu.memory_bytes_per_s=40e9",
    "machine.cpu.dram_bytes_per_s=40e9",
    "machine/link=pcie3_x16",
]
greenroom.predict(*question, *mine, "placement.cpu_layers=24").tokens_per_s

# %% [markdown]
# Or let Greenroom measure it: `greenroom measure --out my_conf --name my_machine` writes a machine file,
# and every function here takes `config_dirs=["my_conf"]`.
#
# ## And with a cache of experts?
#
# A prediction takes the hit rate of a cache from a table of expert use. What a *policy* makes of a
# *recorded* trace on that machine is a simulation (notebook 2). The machine and its changes are the same:

# %%
setting = ["workload.requests=[24,26]", "cache.ratio=0.25", "output.belady=false"]
comparison = greenroom.compare(
    "machine=rtx4090",
    *mine,
    *setting,
    policies=["on_demand", "lru", "fiddler"],
    baseline="on_demand",
)
comparison

# %% [markdown]
# On a machine with both a slow memory and a slow link, which of them is the better way to a missing expert?
# `bottleneck` tells what each policy waits for:

# %%
comparison.table[["policy", "tokens_per_s", "link_stall_share", "cpu_stall_share", "bottleneck"]]

# %% [markdown]
# Next: notebook 5 checks the simulator against the machine that you sit at.
