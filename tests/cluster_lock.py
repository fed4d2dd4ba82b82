"""One cluster at a time on a machine, whoever runs tests there: two of them starve each other."""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def cluster_lock() -> Iterator[None]:
    """Wait until no other test holds a cluster, and hold this one's place."""
    path = Path(tempfile.gettempdir()) / f"greenroom-cluster-{os.getuid()}.lock"
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
