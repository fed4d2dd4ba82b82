"""A file is written whole or not at all; a device or a pipe is written to, and never replaced."""

from __future__ import annotations

import os
import stat
import threading
from pathlib import Path

import pytest

from sim import results
from traces import out_file

WRITERS = (results.whole_file, out_file.whole_file)


@pytest.mark.parametrize("whole_file", WRITERS)
def test_a_pipe_is_written_to_and_stays_a_pipe(whole_file, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    read: list[str] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()))
    reader.start()
    with whole_file(pipe) as partial:
        partial.write_text("told")
    reader.join(10)
    assert read == ["told"]
    assert stat.S_ISFIFO(pipe.stat().st_mode)


@pytest.mark.parametrize("whole_file", WRITERS)
def test_a_device_stays_a_device(whole_file) -> None:
    null = Path("/dev/null")
    for _ in range(2):
        with whole_file(null) as partial:
            assert partial == null
            partial.write_text("gone")
    with pytest.raises(RuntimeError), whole_file(null):
        raise RuntimeError
    assert stat.S_ISCHR(null.stat().st_mode)


def _fail_halfway(whole_file, file: Path) -> None:
    try:
        with whole_file(file) as partial:
            partial.write_text("half")
            raise RuntimeError
    except RuntimeError:
        return
    raise AssertionError("the fault was swallowed")


@pytest.mark.parametrize("whole_file", WRITERS)
def test_a_file_is_there_whole_or_as_it_was(whole_file, tmp_path: Path) -> None:
    file = tmp_path / "f.txt"
    with whole_file(file) as partial:
        partial.write_text("first")
    _fail_halfway(whole_file, file)
    assert file.read_text() == "first"
    assert list(tmp_path.iterdir()) == [file]
