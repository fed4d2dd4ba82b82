"""Requests that an engine has finished, kept beside the trace until all have: a killed run goes on.

One file a request, written whole or not at all, in a folder that also says what was asked.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from traces.importers.npz_file import load_npz
from traces.importers.routed import Routed
from traces.out_file import whole_output
from traces.trace import TraceError

_SETTINGS = "asked.json"


class KeptRequests:
    """The folder; its requests are numbered by prompt.

    ``settings`` (plain JSON) must be those of the run that began the folder, else TraceError says
    which differs.
    """

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        self.folder = folder
        plain = json.loads(json.dumps(settings, sort_keys=True))
        try:
            folder.mkdir(exist_ok=True)
            file = folder / _SETTINGS
            if file.exists():
                before = json.loads(file.read_text(encoding="utf-8"))
                if not isinstance(before, dict):
                    raise TraceError(
                        f"{file}: is damaged: delete the folder, or give another --out"
                    )
                self._compare(plain, before)
            else:
                with whole_output(file) as temporary:
                    temporary.write_text(json.dumps(plain, sort_keys=True, indent=1))
        except TraceError:
            raise
        except (OSError, ValueError, RecursionError) as error:
            raise TraceError(f"{folder}: {getattr(error, 'strerror', None) or error}") from None

    def _compare(self, now: Mapping[str, Any], before: Mapping[str, Any]) -> None:
        for key in {**before, **now}:
            if before.get(key) != now.get(key):
                rule = "finish it as it was begun, give another --out, or delete the folder"
                values = f"{before.get(key)!r}, not {now.get(key)!r}"
                raise TraceError(f"{self.folder}: was begun with {key} {values}: {rule}")

    def numbers(self) -> set[int]:
        """Return the requests that are kept."""
        return {int(file.stem) for file in self.folder.glob("*.npz") if file.stem.isdecimal()}

    def keep(self, number: int, request: Routed, cached_tokens: int) -> None:
        """Keep a finished request."""
        columns: dict[str, NDArray[Any]] = {
            "expert_ids": _narrow(request.expert_ids),
            "facts": np.array([request.num_prompt, request.first_position, cached_tokens]),
        }
        if request.token_id is not None:
            columns["token_id"] = request.token_id.astype(np.int32)
        file = self.folder / f"{number}.npz"
        with whole_output(file) as temporary, temporary.open("wb") as stream:
            np.savez(stream, allow_pickle=False, **columns)

    def load(self, number: int) -> tuple[Routed, int]:
        """Return a kept request, and how many of its prompt's tokens the engine had cached."""
        file = self.folder / f"{number}.npz"
        try:
            columns = load_npz(file)
            num_prompt, first, cached = columns["facts"].tolist()
            ids = columns["expert_ids"]
        except (TraceError, AttributeError, TypeError, ValueError, KeyError):
            raise TraceError(
                f"{file}: is damaged: delete it, and its prompt is sent again"
            ) from None
        token_id = columns.get("token_id")
        request = Routed(
            f"prompt {number}", ids, num_prompt, token_id=token_id, first_position=first
        )
        return request, cached


def forget(folder: Path) -> None:
    """Delete the folder of a run whose trace is written; harmless where there is none."""
    with contextlib.suppress(OSError):
        shutil.rmtree(folder)


def _narrow(ids: NDArray[np.integer]) -> NDArray[np.integer]:
    """Return ids in two bytes each, signed where some slot is empty."""
    if ids.dtype.itemsize <= 2:
        return ids
    return ids.astype(np.int16 if ids.size == 0 or ids.max() < 2**15 else np.int32)
