"""Runs configurations of a file in this fresh process, and prints a digest of what each run leaves.

Run by ``test_determinism.py``, as ``python tests/digests.py CONFIGS.json FOLDER METHOD``: with ``spawn``,
``fork`` or ``forkserver`` the runs are made by a child that was begun so, with ``here`` by this very process.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))


def digest_of(config: dict[str, Any], folder: Path) -> str:
    """Return a digest of the summary and of all tables of a run, or the error that it ends with."""
    from sim.mistakes import explain
    from sim.simulate import simulate

    folder.mkdir()
    try:
        summary, _ = simulate(config, folder)
    except Exception as error:
        return f"error: {explain(error)}"
    found = hashlib.sha256(json.dumps(summary, sort_keys=True).encode())
    for file in sorted(folder.iterdir()):
        found.update(file.name.encode() + file.read_bytes())
    return found.hexdigest()


def run(path: str, folder: str) -> dict[str, str]:
    """Return the digests by name."""
    configs = json.loads(Path(path).read_text(encoding="utf-8"))
    Path(folder).mkdir(parents=True)
    return {name: digest_of(config, Path(folder) / name) for name, config in configs.items()}


def main(path: str, folder: str, method: str) -> None:
    """Print the digests as JSON."""
    if method == "here":
        found = run(path, folder)
    else:
        with multiprocessing.get_context(method).Pool(1) as pool:
            found = pool.apply(run, (path, folder))
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
