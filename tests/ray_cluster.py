"""A Ray cluster of two nodes on this machine, for as long as a test needs it: two raylets, one head."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_STORE_BYTES = 80 * 2**20
_ENV = {
    "RAY_AUTH_MODE": "disabled",  # else Ray leaves a token in the user's home
    "RAY_USAGE_STATS_ENABLED": "0",
}


def why_not() -> str | None:
    """Return why no Ray can be started here, or None."""
    return None if importlib.util.find_spec("ray") else "Ray is not installed here"


class RayCluster:
    """A head and one more node, of one CPU each; at ports that are free."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        self._cluster: Any = Cluster(shutdown_at_exit=True)
        self._cluster.add_node(**self._size(), include_dashboard=False)
        self._second = self._cluster.add_node(**self._size())
        self.address: str = self._cluster.address

    def _size(self) -> dict[str, int]:
        return {"num_cpus": 1, "object_store_memory": _STORE_BYTES}

    def node_ids(self) -> set[str]:
        """Return Ray's names for the nodes."""
        return {node.node_id for node in self._cluster.list_all_nodes()}

    def kill_second_node(self) -> None:
        """Kill all processes of the node that is not the head."""
        self._cluster.remove_node(self._second, allow_graceful=False)

    def stop(self) -> None:
        """End all nodes."""
        self._cluster.shutdown()


@contextmanager
def ray_cluster() -> Iterator[RayCluster]:
    """Run a cluster, with an environment in which Ray leaves nothing behind."""
    before = {name: os.environ.get(name) for name in _ENV}
    os.environ.update(_ENV)
    cluster = None
    try:
        cluster = RayCluster()
        yield cluster
    finally:
        if cluster is not None:
            cluster.stop()
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
