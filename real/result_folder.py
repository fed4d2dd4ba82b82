"""The folder that a run's results go to."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path

from sim.types import ConfigError


@contextmanager
def result_folder(asked: Path | None, *, make: bool = False) -> Iterator[Path]:
    """Give the folder of the results; what of it was made here and is empty goes if anything is raised.

    Parameters
    ----------
    asked
        None: a new one below ``outputs``.
    make
        Make it at once: for what measures for minutes before it writes.

    Raises
    ------
    ConfigError
        It is a file, or with ``make`` nothing can be written to it.
    """
    folder = asked or Path("outputs", f"{datetime.now():%Y-%m-%d/%H-%M-%S.%f}")
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"--out {folder}: must be a folder, and is a file")
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        if make:
            folder.mkdir(parents=True, exist_ok=True)
            if not os.access(folder, os.W_OK | os.X_OK):
                raise ConfigError(f"--out {folder}: must be a folder that can be written to")
        yield folder
    except BaseException:
        for path in made:  # the innermost first
            with suppress(OSError):
                path.rmdir()
        raise
