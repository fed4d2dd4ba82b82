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
# # 2. Compare policies
#
# GPU memory holds some of a model's experts. A **policy** decides which: whom to drop when a new one comes,
# what to load ahead, and whether a missing expert is copied to the GPU or computed by the CPU where it
# lies. This notebook runs one policy, then several, and reads the results. As commands: `greenroom sim`,
# `greenroom sweep`.

# %%
import greenroom

# %% [markdown]
# ## One run
#
# Settings are those of the command line (`greenroom sim --help` lists them). Here: an RTX 4090, expert and
# layer sizes of Qwen3-30B-A3B, a quarter of the experts in GPU memory, two requests of the bundled trace
# one at a time. The bundled model has 8 layers, so the speeds are those of an 8-layer model: good for
# comparing policies, not for the speed of the whole model (notebook 4 is about that).

# %%
setting = ["machine=rtx4090", "model=qwen3_30b_a3b", "workload.requests=[24,26]"]
run = greenroom.simulate(*setting, "cache.ratio=0.25", policy="lru")
run

# %% [markdown]
# `run.summary` is one row with everything: choices, metrics, provenance. Each metric is defined by its
# formula in `docs/metrics.md`. Times are in nanoseconds and memory in bytes, as the end of each name says.

# %%
names = [
    "tokens_per_s",
    "hit_rate",
    "gpu_share",
    "link_stall_share",
    "cpu_stall_share",
    "bottleneck",
]
{name: run.summary[name] for name in names}

# %% [markdown]
# So about three quarters of the time the GPU waits for the link: experts are copied to it. Below the
# summary there are tables, by step and by request.

# %%
run.requests[["request_id", "prompt_tokens", "output_tokens", "ttft_ns", "tpot_ns", "outcome"]]

# %%
run.steps[
    ["step", "phase", "num_tokens", "start_ns", "end_ns", "accesses", "hits", "link_stall_ns"]
].head()

# %% [markdown]
# ## Several
#
# `sweep` runs all combinations of the values that are listed, on all cores. Seven policies at three cache
# sizes:
#
# - `on_demand` keeps nothing, `lru` and `lfu` are what they are everywhere, `static` holds the experts most
#   used in other requests;
# - `fiddler` is static too, and computes a missing expert on the CPU where that is faster than copying it;
# - `saem` adds a cache that changes at the boundaries of reasoning stages;
# - `belady_bypass` knows the future: nobody who drops and loads experts on demand can hit more.

# %%
policies = ["on_demand", "lru", "lfu", "static", "fiddler", "saem", "belady_bypass"]
sizes = "cache.ratio=0.125,0.25,0.5"
sweep = greenroom.sweep(*setting, sizes, "output.belady=false", policies=policies)
sweep.table[["policy", "cache_ratio", "tokens_per_s", "hit_rate", "h2d_bytes", "bottleneck"]]

# %% [markdown]
# One column of the results, a row a setting and a column a policy:

# %%
sweep.by_setting("tokens_per_s").round(1)

# %%
sweep.by_setting("hit_rate").round(3)

# %% [markdown]
# Two things to see. At 12.5 % a layer holds four experts, as many as a token uses: who lets every miss in,
# as `lru` does, has no choice left, and only keeping newcomers out, as `belady_bypass` may, hits more. And
# hits are not speed: `fiddler` hits less than `lru`, yet is faster, for what it misses is computed by the
# CPU instead of going over the link.

# %%
sweep.plot("throughput_by_cache")

# %%
sweep.plot("stall_breakdown")

# %% [markdown]
# ## A league
#
# With many settings one wants a single figure for each policy: its speed over that of a *baseline* in the
# same setting, as the geometric mean over all settings, with the worst and the best of them. Policies that
# know the future (`oracle`) or change the model's answer (`lossy`) play in a class of their own.

# %%
sweep.league(baseline="lru").round(3)

# %% [markdown]
# `compare` does both in one call. Here at a batch of eight requests, whose experts a step loads for all of
# them:

# %%
comparison = greenroom.compare(
    "machine=rtx4090",
    "workload.requests=[24,32]",
    "workload.batch_size=8",
    "cache.ratio=0.25",
    "output.belady=false",
    policies=["lru", "fiddler", "saem"],
    baseline="lru",
)
comparison

# %% [markdown]
# ## Keep the results
#
# Without a `folder` the files live as long as the object. With one they stay, and the same call goes on
# where it was stopped; `greenroom plot` and `greenroom report` read such folders too.
#
# ```python
# greenroom.sweep(*setting, sizes, policies=policies, folder="outputs/first_sweep")
# ```
#
# Next: notebook 3 adds a policy of your own.
