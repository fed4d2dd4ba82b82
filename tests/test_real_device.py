"""The seam to hardware: host memory, and the protocol of CUDA's streams and events on a fake of it."""

from __future__ import annotations

import gc
import mmap
import time
from threading import Event

import pytest

torch = pytest.importorskip("torch", reason="the real backend needs torch")

from real import host_memory  # noqa: E402
from real.carriers import RAMCarrier, ThrottledCarrier  # noqa: E402
from real.copies import Copy, CopyEngine  # noqa: E402
from real.cuda_device import CUDADevice  # noqa: E402
from real.device import CPUDevice, open_device  # noqa: E402
from real.errors import RealError  # noqa: E402
from real.experts import ExpertFormat  # noqa: E402
from real.slots import Arena  # noqa: E402
from real.store import RAMStore, build_ram  # noqa: E402
from real.synthetic import Synthetic  # noqa: E402
from sim.events import Kind  # noqa: E402
from sim.types import ConfigError  # noqa: E402
from tests.fake_cuda import DRIFT, FakeCUDA  # noqa: E402

FORM = ExpertFormat(16, 32, "float32")


@pytest.fixture(params=[True, False], ids=["copies_first", "kernels_first"])
def cuda(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> FakeCUDA:
    return FakeCUDA(monkeypatch, request.param)


@pytest.fixture
def device(cuda: FakeCUDA) -> CUDADevice:
    return CUDADevice()


def small_store(device: CUDADevice | CPUDevice, num_experts: int = 12) -> RAMStore:
    return build_ram(Synthetic(1, num_experts, FORM), device)


# -- names ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["cudda", "cpu:0", "cuda:x", "cuda:-1", ""])
def test_a_wrong_name_is_told_in_one_line(name: str) -> None:
    with pytest.raises(ConfigError, match=f"device = {name}: must be auto, cpu, cuda or cuda:N"):
        open_device(name)


def test_a_device_that_is_not_there_is_told_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert open_device("auto").kind == "cpu"
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(RealError, match=r"cuda: this torch .* is built without CUDA; docs/cuda.md"):
        open_device("cuda")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    with pytest.raises(RealError, match=r"cuda:1: torch for CUDA 13.0 finds no device"):
        open_device("cuda:1")


def test_a_number_beyond_the_devices_is_refused(cuda: FakeCUDA) -> None:
    assert open_device("auto").kind == "cuda"
    with pytest.raises(RealError, match="must be below cuda:1, as there are 1"):
        open_device("cuda:1")


# -- host memory ---------------------------------------------------------------------------------


@pytest.mark.parametrize("num_bytes", [1, 4096, 5000, 3 << 20])
def test_host_memory_begins_at_a_page_and_is_written_and_read(num_bytes: int) -> None:
    found = CPUDevice().host_buffer(num_bytes)
    assert found.numel() == num_bytes
    assert found.data_ptr() % mmap.PAGESIZE == 0
    assert not found.any()
    found.fill_(7)
    assert bool((found == 7).all())
    assert CPUDevice().host_buffer(0).numel() == 0


def test_memory_that_no_machine_has_is_refused_in_one_line() -> None:
    with pytest.raises(RealError, match=r"^\d+ bytes of host memory cannot be had: .*$"):
        CPUDevice().host_buffer(1 << 60)


def test_the_cpu_counts_what_it_gave_out() -> None:
    device = CPUDevice()
    device.buffer(5000)
    device.buffer(3000)
    device.give_back(5000)
    assert (device.held_bytes, device.peak_bytes()) == (3000, 8000)
    device.reset_peak()
    device.buffer(10)
    assert device.peak_bytes() == 3010


def test_all_of_a_buffer_is_locked_and_unlocked_before_it_is_unmapped(
    cuda: FakeCUDA, device: CUDADevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_memory, "CHUNK_BYTES", 8192)
    found = device.host_buffer(20000)
    begin = found.data_ptr()
    assert cuda.cudart.locked == {begin: 8192, begin + 8192: 8192, begin + 16384: 20000 - 16384}
    view = found[12000:12001]
    del found
    gc.collect()
    assert cuda.cudart.locked  # a view still shows it
    del view
    gc.collect()
    assert not cuda.cudart.locked  # the fake checks that it was still mapped


@pytest.mark.filterwarnings("error")
def test_memory_that_cannot_be_locked_is_said_aloud_and_used(
    cuda: FakeCUDA, device: CUDADevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_memory, "CHUNK_BYTES", 8192)
    cuda.cudart.refuse_after = 2
    with pytest.warns(UserWarning, match=r"20000 bytes .* cannot be locked \(CUDA error 2\)"):
        found = device.host_buffer(20000)
    assert not cuda.cudart.locked  # all or nothing
    assert not cuda.cudart.has_error  # or the next kernel would be blamed for it
    assert device.why_not_locked == "CUDA error 2"
    target = device.buffer(20000)
    device.copy(target, found.fill_(3))
    assert bool((target.as_subclass(torch.Tensor) == 3).all())


def test_no_copy_crosses_what_two_calls_locked(
    cuda: FakeCUDA, device: CUDADevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_memory, "CHUNK_BYTES", 8192)
    source = device.host_buffer(40960)
    source.copy_(torch.arange(40960) % 251)
    assert device._parts(source) == [(i * 8192, (i + 1) * 8192) for i in range(5)]
    assert device._parts(source[8192:16384]) == [(0, 8192)]
    assert device._parts(source[8000:17000]) == [(0, 192), (192, 8384), (8384, 9000)]
    target = device.buffer(9000)
    device.copy(target, source[8000:17000])
    assert torch.equal(target.as_subclass(torch.Tensor), source[8000:17000])


# -- streams and events --------------------------------------------------------------------------


def test_the_fake_finds_an_event_that_is_waited_for_before_it_is_recorded(cuda: FakeCUDA) -> None:
    with pytest.raises(AssertionError, match="never recorded"):
        torch.cuda.Event().synchronize()
    with pytest.raises(AssertionError, match="never recorded"):
        torch.cuda.Stream().wait_event(torch.cuda.Event())


def test_a_copy_is_there_when_it_returns(device: CUDADevice) -> None:
    target, source = device.buffer(4096), device.host_buffer(4096).fill_(5)
    device.copy(target, source)
    source.fill_(6)  # the next block of a file, through the same memory
    device.synchronize()
    assert bool((target.as_subclass(torch.Tensor) == 5).all())


@pytest.mark.parametrize("is_fenced", [True, False])
def test_a_copy_waits_for_kernels_that_read_the_slot(
    monkeypatch: pytest.MonkeyPatch, is_fenced: bool
) -> None:
    cuda = FakeCUDA(monkeypatch, copies_first=True)
    device = CUDADevice()
    slot = device.buffer(4096)
    device.copy(slot, device.host_buffer(4096).fill_(1))
    read: list[int] = []
    cuda.launch(lambda: read.append(int(slot[0])))
    if is_fenced:
        device.copies_wait_for(device.fence())
    device.copy(slot, device.host_buffer(4096).fill_(2))
    device.synchronize()
    assert read == [1 if is_fenced else 2]  # without a fence the kernel reads the next expert


def test_a_fence_does_not_wait_for_kernels_that_come_after_it(
    cuda: FakeCUDA, device: CUDADevice
) -> None:
    slot, seen = device.buffer(4096), []
    fence = device.fence()
    cuda.launch(seen.append, 1)
    device.copies_wait_for(fence)
    device.copy(slot, device.host_buffer(4096))
    assert seen == ([] if cuda.copies_first else [1])


def test_who_waits_for_kernels_does_not_wait_for_copies(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cuda = FakeCUDA(monkeypatch, copies_first=False)
    device = CUDADevice()
    seen: list[str] = []
    with torch.cuda.stream(device._copies):
        cuda.launch(seen.append, "copy")  # a prefetch on its way
    cuda.launch(seen.append, "kernel")
    device.synchronize()
    assert seen == ["kernel"]


def test_memory_given_out_anew_is_not_written_by_kernels_from_before(
    cuda: FakeCUDA, device: CUDADevice
) -> None:
    old = torch.zeros(4096, dtype=torch.uint8)
    cuda.launch(old.fill_, 9)
    cuda.free_blocks.append(old)  # the allocator orders its use on the compute stream only
    new = device.buffer(4096)
    device.copy(new, device.host_buffer(4096).fill_(4))
    device.synchronize()
    assert bool((old == 4).all())
    assert cuda.used_by == [device._copies]  # and not given out again before copies have ended


@pytest.mark.parametrize("is_fenced", [True, False])
def test_slots_are_reused_by_the_engine_behind_fences(
    monkeypatch: pytest.MonkeyPatch, is_fenced: bool
) -> None:
    cuda = FakeCUDA(monkeypatch, copies_first=True)
    device = CUDADevice()
    store = small_store(device)
    arena = Arena(device, [FORM], [3], [0] * 12)
    wrong: list[int] = []

    def kernel(key: int, slot: torch.Tensor) -> None:
        if not torch.equal(slot.as_subclass(torch.Tensor), store.bytes_of(key)):
            wrong.append(key)

    with CopyEngine(RAMCarrier(store, device, chunks=3)) as engine:
        held: list[int] = []
        for round_keys in ([0, 1, 2], [3, 4], [5, 0, 6], [7], [8, 9, 10], [11, 1]):
            for key in held[: max(0, len(held) + len(round_keys) - 3)]:
                held.remove(key)
                arena.free(key)
            fence = device.fence() if is_fenced else None
            slots = {key: arena.take(key) for key in round_keys}
            for key, slot in slots.items():
                engine.submit(Copy(key, Kind.LOAD, slot, fence))
            while engine.num_under_way or engine.has_news:
                for copy in engine.wait():
                    cuda.launch(kernel, copy.key, slots[copy.key])
            held += round_keys
    device.synchronize()
    assert not wrong if is_fenced else wrong
    arena.close()
    store.close()


# -- times ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps_synchronise", [True, False])
def test_times_of_stamps_stay_with_the_clock_of_the_host(
    cuda: FakeCUDA, device: CUDADevice, steps_synchronise: bool
) -> None:
    step_ns, age_ns = 40_000_000, 1_000_000_000 if steps_synchronise else 4_000_000_000
    told: list[tuple[int, int]] = []
    for _ in range(2500):  # 100 s, in which the clocks drift 3 ms apart
        cuda.pass_time(step_ns)
        stamp = device.stamp()
        true: list[int] = []
        cuda.launch(lambda true=true: true.append(cuda.host_ns))
        told.append((device.time_ns(stamp), cuda.host_ns))
        if steps_synchronise:
            device.synchronize()
    bound_ns = DRIFT * (age_ns + 2 * step_ns) + 10_000
    assert max(abs(time_ns - true_ns) for time_ns, true_ns in told) < bound_ns
    times = [time_ns for time_ns, _ in told]
    assert times == sorted(times)


def test_a_stamp_keeps_its_time_when_the_clock_is_set_anew(
    cuda: FakeCUDA, device: CUDADevice
) -> None:
    stamp = device.stamp()
    before_ns = device.time_ns(stamp)
    cuda.pass_time(30_000_000_000)
    device.synchronize()
    device.time_ns(device.stamp())
    assert device.time_ns(stamp) == before_ns


# -- errors --------------------------------------------------------------------------------------


def test_too_little_memory_is_told_in_one_line(cuda: FakeCUDA, device: CUDADevice) -> None:
    cuda.fault = torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate\nmore lines")
    with pytest.raises(RealError) as caught:
        device.buffer(9000)
    line = str(caught.value)
    assert "cuda:0: 9000 bytes for experts: out of memory, 1000 of 4000 bytes are free" in line
    assert "\n" not in line
    assert device.held_bytes == 0


def test_a_lost_device_is_told_in_one_line_by_whoever_waits(
    cuda: FakeCUDA, device: CUDADevice
) -> None:
    store = small_store(device)
    arena = Arena(device, [FORM], [1], [0] * 12)
    cuda.fault = RuntimeError("CUDA error: unspecified launch failure\nmore lines")
    with CopyEngine(RAMCarrier(store, device)) as engine:
        engine.submit(Copy(3, Kind.LOAD, arena.take(3), device.fence()))
        with pytest.raises(RealError, match=r"^cuda:0: CUDA error: unspecified launch failure$"):
            engine.wait()


def test_errors_that_are_not_the_devices_pass_through(device: CUDADevice) -> None:
    with pytest.raises(RuntimeError, match="shapes") as caught, device.faults():
        raise RuntimeError("shapes do not match")
    assert not isinstance(caught.value, RealError)


# -- a copy that is asked for while another is on its way ------------------------------------------


class Gates:
    """A link that carries a piece when it is told to."""

    num_workers = 1

    def __init__(self, num_ahead: int) -> None:
        self.num_ahead = num_ahead
        self.begun = {key: Event() for key in range(10)}
        self.gate = {key: Event() for key in range(10)}

    def pieces(self, copy: Copy) -> list[tuple[int, int]]:
        return [(0, copy.num_bytes)]

    def carry(self, copy: Copy, offset: int, size: int) -> None:
        self.begun[copy.key].set()
        assert self.gate[copy.key].wait(20)

    def close(self) -> None:
        for gate in self.gate.values():
            gate.set()


def a_copy(key: int, kind: Kind = Kind.LOAD) -> Copy:
    return Copy(key, kind, torch.empty(8, dtype=torch.uint8))


def test_one_awaited_copy_goes_behind_another_and_begins_when_that_has_ended() -> None:
    gates = Gates(num_ahead=1)
    with CopyEngine(gates) as engine:
        first, second, third = a_copy(1), a_copy(2), a_copy(3)
        for copy in (first, second, third):
            engine.submit(copy)
        assert gates.begun[1].wait(20)
        assert gates.begun[2].wait(20)  # asked for while the first is on its way
        assert not engine.cancel(2)
        assert engine.cancel(3)
        gates.gate[1].set()
        assert [copy.key for copy in engine.wait()] == [1]
        gates.gate[2].set()
        assert [copy.key for copy in engine.wait()] == [2]
    assert first.end_ns <= second.begin_ns <= second.end_ns


def test_a_copy_nobody_waits_for_goes_behind_nothing_until_somebody_does() -> None:
    gates = Gates(num_ahead=1)
    with CopyEngine(gates) as engine:
        engine.submit(a_copy(1))
        assert gates.begun[1].wait(20)
        engine.submit(a_copy(9, Kind.PREFETCH))
        while not engine._wanted._waiters:  # the second thread has looked, and sleeps again
            time.sleep(0.001)
        assert not gates.begun[9].is_set()
        engine.promote(9)
        assert gates.begun[9].wait(20)
        for key in (1, 9):
            gates.gate[key].set()
        engine.wait()


def test_only_a_plain_link_on_cuda_is_asked_ahead(device: CUDADevice) -> None:
    on_cuda, on_cpu = small_store(device), small_store(CPUDevice())
    assert RAMCarrier(on_cuda, device).num_ahead == 1
    assert RAMCarrier(on_cpu, CPUDevice()).num_ahead == 0
    assert ThrottledCarrier(RAMCarrier(on_cuda, device), 10**9).num_ahead == 0
