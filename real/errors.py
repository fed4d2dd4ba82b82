"""What goes wrong with files, devices and memory while weights are moved: one kind of ConfigError."""

from __future__ import annotations

from sim.types import ConfigError


class RealError(ConfigError):
    """A fault of a file or of the machine; one line that names what, where and the rule."""
