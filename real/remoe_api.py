"""The bundled model recorded before and after ReMoE, for notebooks and scripts."""

from __future__ import annotations

import warnings
from importlib import resources
from pathlib import Path

from sim.api_mistakes import plain_mistakes
from sim.types import ConfigError

BEFORE, AFTER = "before", "remoe"
GATES = ("traces.tiny", "remoe_gates.safetensors")
"""The gates that come with the project, as package and file."""


@plain_mistakes("remoe")
def record_before_and_after(
    folder: Path | str, requests: int = 2, *, seed: int | None = None
) -> dict[str, Path]:
    """Record the bundled model with its own gates, and with those that ReMoE has trained.

    Prompts and noise are the same in both, those of the bundled trace.

    Parameters
    ----------
    folder
        Where the traces go; what is there already is not recorded again.
    requests
        How many, from the first.
    seed
        Of problems and sampling; None: that of the bundled trace.

    Returns
    -------
    dict
        The trace files ``before`` and ``remoe``.
    """
    with warnings.catch_warnings():  # transformers' bars want a package that no notebook here needs
        warnings.filterwarnings("ignore", message="IProgress not found")
        from real.remoe_config import RemoeConfig
        from real.remoe_gates import load_gates
        from real.remoe_record import record_gates
        from real.remoe_subject import load_gate_subject

    if requests < 1:
        raise ConfigError(f"requests = {requests}: must be >= 1")
    config = RemoeConfig.composed().plain
    asked = {**config["speed"], "requests": requests}
    if seed is not None:
        asked["seed"] = seed
    subject = load_gate_subject("tiny", None, None, config)
    with resources.as_file(resources.files(GATES[0]) / GATES[1]) as path:
        trained, _ = load_gates(path)
    found = {}
    Path(folder).mkdir(parents=True, exist_ok=True)
    for name, gates in ((BEFORE, None), (AFTER, trained)):
        found[name] = Path(folder) / f"{name}.parquet"
        record_gates(subject, name, gates, found[name], asked)
    return found
