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
# # 3. Write your own policy
#
# A policy is made of *parts*, each a class with one verb: a cache chooses a victim, a prefetcher proposes,
# a placement places. You write the part that you have an idea for and take the others as they are. It knows
# neither clock nor hardware, so the same class also runs with real weights (notebook 5). All roles and
# hooks are in `docs/policies.md`.

# %%
import pandas as pd

import greenroom
from sim.policies.base import CachePolicy, PlacementPolicy
from sim.types import Service

pd.set_option("display.max_colwidth", None)

# %% [markdown]
# ## A cache
#
# The idea: LRU forgets how often an expert was used, LFU never forgets. Let each use add 1 to an expert's
# score, and let all scores fade. When room is needed, drop the expert with the lowest score.
#
# A cache rules the experts of one layer. Experts are numbers (*keys*) over the whole model. The rule for
# victims: only a key for which `evictable(key)` holds may be named, for experts that are in use right now
# must stay.


# %%
class Fading(CachePolicy):
    """Drop the expert with the lowest score; a use adds 1, a step takes ``fade`` of it."""

    def __init__(self, fade: float = 0.05) -> None:
        self.keep = 1.0 - fade
        self.scores: dict[int, tuple[float, int]] = {}  # score, and the step it is of
        self.members: set[int] = set()

    def score(self, key, step):
        score, then = self.scores.get(key, (0.0, step))
        return score * self.keep ** (step - then)

    def observe(self, routing, view):  # every use, hit or miss
        step = view.step.step
        for key in routing.experts:
            self.scores[key] = (self.score(key, step) + 1.0, step)

    def on_insert(self, key, view):
        self.members.add(key)

    def on_evict(self, key):
        self.members.remove(key)

    def choose_victim(self, evictable, view):
        step = view.step.step
        return min(
            filter(evictable, self.members), key=lambda key: self.score(key, step), default=None
        )


# %% [markdown]
# The class itself is a policy that `simulate` takes; its name becomes `fading`.

# %%
setting = [
    "machine=rtx4090",
    "model=qwen3_30b_a3b",
    "workload.requests=[24,27]",
    "cache.ratio=0.25",
]
greenroom.simulate(*setting, policy=Fading)

# %% [markdown]
# ## Is it a good citizen?
#
# `check_policy` holds it against what must be true of every policy: each expert is served once and memory
# is never over-filled, two runs are alike, it does not know the future, it lives with less memory, ...

# %%
greenroom.check_policy(Fading)

# %% [markdown]
# What a broken policy looks like: this one may name a victim that is in use. The last column says where,
# and the rules after it are not looked at.


# %%
class Stubborn(Fading):
    """Drop the expert with the lowest number, in use or not."""

    def choose_victim(self, evictable, view):
        return min(self.members)


greenroom.check_policy(Stubborn)

# %% [markdown]
# ## Against the others
#
# A mapping gives a policy a name and its parameters; it holds what a policy's YAML file would. `belady` is
# the best that any cache can do that lets every miss in. (Classes of a notebook exist in this process only,
# so this sweep runs one after another instead of on all cores.)

# %%
slow = {"name": "fading_slow", "cache": {"_target_": Fading, "fade": 0.01}}
quick = {"name": "fading_quick", "cache": {"_target_": Fading, "fade": 0.3}}
comparison = greenroom.compare(
    "machine=rtx4090",
    "workload.requests=[24,26]",
    "cache.ratio=0.25,0.5",
    "output.belady=false",
    policies=["lru", "lfu", Fading, slow, quick, "belady"],
    baseline="lru",
)
comparison

# %%
comparison.by_setting("hit_rate").round(3)

# %%
comparison.plot()

# %% [markdown]
# ## Another part: where a missing expert runs
#
# A placement is asked about the experts of a layer that are missing. The idea: of several, let the CPU
# compute every other one while the link copies the rest. Any cache goes with it.


# %%
class HalfOnCPU(PlacementPolicy):
    """Every other missing expert runs on the CPU, those with the fewest tokens first."""

    def place(self, work, view):
        order = sorted(range(len(work)), key=lambda place: work[place].num_tokens)
        on_cpu = set(order[: len(work) // 2])
        return [Service.CPU if place in on_cpu else Service.LOAD for place in range(len(work))]


half = {"name": "half", "cache": Fading, "placement": HalfOnCPU}
comparison = greenroom.compare(
    *setting, "output.belady=false", policies=["lru", Fading, half, "fiddler", "hybrimoe"]
)
comparison

# %% [markdown]
# ## Make it stay
#
# Put the class into a module, say `my_parts.py`, and the mapping into a file, and commands know it too:
#
# ```yaml
# # my_conf/policy/fading.yaml
# name: fading
# scope: layer
# cache:
#   _target_: my_parts.Fading
#   fade: 0.05
# ```
#
# Then, with the folder named:
#
# ```sh
# greenroom sweep --config-dir my_conf policy=lru,fading cache.ratio=0.125,0.25,0.5
# ```
#
# In Python: `greenroom.sweep(..., policies=["lru", "fading"], config_dirs=["my_conf"])`, on all cores.
# Next: notebook 4 asks what a model does on your machine.
