"""A file is written whole or not at all; a device or a pipe is written to, and never replaced."""

from __future__ import annotations

import os
import stat
import threading
from pathlib import Path

import pytest

from traces.out_file import whole_file, whole_output
from traces.schema import TraceError

WRITERS = (whole_file, whole_output)


@pytest.mark.parametrize("writer", WRITERS)
def test_a_pipe_is_written_to_and_stays_a_pipe(writer, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    read: list[str] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()))
    reader.start()
    with writer(pipe) as partial:
        partial.write_text("told")
    reader.join(10)
    assert read == ["told"]
    assert stat.S_ISFIFO(pipe.stat().st_mode)


@pytest.mark.parametrize("writer", WRITERS)
def test_a_device_stays_a_device(writer) -> None:
    null = Path("/dev/null")
    for _ in range(2):
        with writer(null) as partial:
            assert partial == null
            partial.write_text("gone")
    with pytest.raises(RuntimeError), writer(null):
        raise RuntimeError
    assert stat.S_ISCHR(null.stat().st_mode)


def _fail_halfway(writer, file: Path) -> None:
    try:
        with writer(file) as partial:
            partial.write_text("half")
            raise RuntimeError
    except RuntimeError:
        return
    raise AssertionError("the fault was swallowed")


@pytest.mark.parametrize("writer", WRITERS)
def test_a_file_is_there_whole_or_as_it_was(writer, tmp_path: Path) -> None:
    file = tmp_path / "f.txt"
    with writer(file) as partial:
        partial.write_text("first")
    _fail_halfway(writer, file)
    assert file.read_text() == "first"
    assert list(tmp_path.iterdir()) == [file]


def test_what_the_system_refuses_names_the_file_that_is_meant(tmp_path: Path) -> None:
    file = tmp_path / "no" / "f.txt"
    with pytest.raises(FileNotFoundError) as found, whole_file(file) as partial:
        partial.write_text("never")
    assert found.value.filename == str(file)
    with (
        pytest.raises(TraceError, match=f"^{file}: No such file or directory$"),
        whole_output(file) as partial,
    ):
        partial.write_text("never")
    for writer in WRITERS:
        with (
            pytest.raises(TraceError, match=r"^/: is a folder: must be a file$"),
            writer(Path("/")),
        ):
            pass
