"""Which groups of options the files of ``conf/`` are composed of; imports nothing."""

from __future__ import annotations

PARTS = ("machine/gpu", "machine/cpu", "machine/link", "machine/storage")
RUN = ("trace", "model", "machine", *PARTS, "engine", "policy")
GROUPS = {
    "config": RUN,
    "sweep": (*RUN, "sweep"),
    "replay": RUN,
    "validate": (),
    "remoe": (),
    "predict": ("model", "machine", *PARTS, "engine", "placement", "usage"),
}
"""Groups by the file in ``conf/`` that has them."""
WITH_EXPERIMENTS = ("config", "sweep", "replay")
"""Files that ``+experiment=`` goes with."""
