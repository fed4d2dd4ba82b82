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
# # 1. A first look at a trace
#
# A Mixture-of-Experts model has many small networks (*experts*) in each layer, and a *router* that picks a
# few of them for every token. A **trace** is the record of those picks: for each token and each layer,
# which experts it used. It is all that Greenroom needs to know of a model's behaviour; what an expert
# weighs and how fast a machine is come from other files (notebook 4).
#
# Everything here also exists as a command: `greenroom stats`, and `greenroom record` to make a trace.

# %%
import pandas as pd

import greenroom

pd.set_option("display.max_colwidth", None)

# %% [markdown]
# `load_trace` takes the name of a bundled trace or any file that `greenroom import` can read. The bundled
# one was recorded from a small model that comes with the project, while it solved word problems step by
# step.

# %%
trace = greenroom.load_trace("tiny")
trace

# %% [markdown]
# The header says where a trace comes from. *Provenance* is the part to look at first: `recorded` from a
# running model, `imported` from somebody's file, `transformed`, or `synthetic`.

# %%
trace.meta.provenance

# %% [markdown]
# ## What one row is
#
# A row is a token that the engine has processed. Requests follow one another; within a request, the prompt
# (*prefill*) comes first and then one token at a time (*decode*). Here is the text of one request, as the
# model wrote it.

# %%
request = 24
rows = trace.request_id == request
text = "".join(piece for piece, is_ours in zip(trace.text, rows, strict=True) if is_ours)
print(text)

# %% [markdown]
# And the experts that some of its tokens used in the first and in the last layer, the one with the highest
# weight first. `phase` is 0 in the prompt and 1 while decoding; `stage` is the part of the reasoning a
# token belongs to, which the recorder could annotate because the text follows a known pattern.

# %%
one = trace.take(rows)
some = slice(150, 162)
pd.DataFrame(
    {
        "position": one.position[some],
        "phase": one.phase[some],
        "text": one.text[some],
        "stage": [one.meta.stage_names[stage] for stage in one.stage[some]],
        "first layer": one.expert_ids[some, 0].tolist(),
        "last layer": one.expert_ids[some, -1].tolist(),
    }
)

# %% [markdown]
# ## How local is the routing?
#
# If tokens use the same experts again and again, a small cache of experts in GPU memory goes a long way; if
# they pick at random, none does. `stats` measures that in one pass, and ends in plain words.
# (`curve_tokens` limits the part that is replayed through caches of every size, which takes most of the
# time.)

# %%
stats = greenroom.stats("tiny", curve_tokens=4000)
stats.verdict[["answer"]]

# %% [markdown]
# The whole page: *reuse* is the share of a token's experts that an earlier token used too; *popularity*
# tells whether a few experts do most of the work; then hit rates of caches of all sizes beside the optimum,
# distinct experts in a stretch of tokens, likeness of neighbouring stretches, and how well the next layer
# can be foreseen. Each is defined in `docs/locality.md`.

# %%
stats

# %% [markdown]
# The same as a figure. At the top left, the distance between *LRU* and *optimal* is what a better policy
# could gain with that much memory; that above *random* is what locality is worth.

# %%
stats.plot()

# %% [markdown]
# ## Who used what, and when
#
# To see the routing itself, replay the request and draw which experts each step used. Vertical lines are
# the boundaries of stages.

# %%
run = greenroom.simulate("workload.requests=[24,25]", policy="lru", events=True)
run.plot("heatmap", layer=0)

# %% [markdown]
# ## Your own trace
#
# `greenroom record` writes a trace from a Hugging Face model or a running server, `greenroom import` reads
# those of others. Either way:
#
# ```python
# trace = greenroom.load_trace("my.parquet")
# greenroom.stats("my.parquet")
# ```
#
# A path that is wrong, or a file that breaks a rule of the format, is told in one line:

# %%
try:
    greenroom.load_trace("tinny")
except greenroom.ConfigError as error:
    print(error)

# %% [markdown]
# Next: notebook 2 replays this trace under different policies and compares their speed.
