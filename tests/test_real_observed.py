"""What runs showed, added up and turned into a machine: by hand."""

from __future__ import annotations

import pytest

from hwmodels.machine import Machine
from real.device import CPUDevice
from real.observed import Observed, sum_of
from real.rig import Tier
from real.validate_machine import first_guess, machine_of


def seen() -> Observed:
    """A run of two experts alone (100 ns), one beside the host's (150), and three copies of 1000 bytes."""
    found = Observed()
    for time_ns in (90, 110):
        found.kernel(1000, 1, time_ns)
    found.kernel(1000, 1, 150, beside_cpu=True)
    found.cpu_kernel(1000, 1, 400)
    found.first_copy.add(700, 1000)
    found.next_copy.add(500, 1000)
    found.next_copy.add(300, 1000)
    found.copied_bytes, found.copy_busy_ns = 3000, 1500
    found.setup.add(20)
    found.wake.add(30)
    found.python.add(5000, 10)
    return found


def test_the_rate_is_that_of_copies_behind_others_and_the_first_ones_delay_is_setup() -> None:
    found = seen()
    assert found.copy_bytes_per_s == 2_500_000_000  # 1000 bytes in 400 ns
    assert found.copy_setup_ns(1000) == 20 + (700 - 400) + 30


def test_without_copies_behind_others_all_count() -> None:
    found = Observed(copied_bytes=3000, copy_busy_ns=1500)
    found.first_copy.add(1500, 3000)
    assert found.copy_bytes_per_s == 2_000_000_000
    assert Observed().copy_bytes_per_s == 0


def test_kernels_beside_the_host_keep_a_share_of_their_rate() -> None:
    assert seen().kept_beside_cpu == pytest.approx(100 / 150)
    assert Observed().kept_beside_cpu == 1.0


def test_several_runs_add_up_to_means_over_all() -> None:
    other = Observed()
    other.kernel(1000, 1, 400)
    other.dense.update(first_guess().dense)
    whole = sum_of([seen(), other])
    assert whole.kernels[1000, 1].value() == 200
    assert whole.kernels[1000, 1].count == 3
    assert whole.copy_bytes_per_s == 2_500_000_000
    assert seen().kernels[1000, 1].count == 2  # the parts are as they were


@pytest.mark.parametrize("tier", ["ram", "storage", "link"])
def test_a_machine_of_it_has_its_figures(tier: str) -> None:
    mapping = machine_of(seen(), CPUDevice(), Tier(tier), 1, 1)
    machine = Machine.from_mapping(mapping)
    assert machine.gpu is not None
    assert machine.gpu.expert_table == ((1000, 1, 100),)
    assert machine.gpu.rate_beside_cpu_ratio == pytest.approx(100 / 150)
    assert machine.gpu.attention_floor_ns == 500  # Python alone, as no dense work was seen
    assert machine.cpu.expert_table == ((1000, 1, 400),)
    if tier == "storage":
        assert machine.link is None
        assert machine.storage is not None
        assert machine.storage.bytes_per_s(4096, 1) == 2_500_000_000
        assert machine.storage.setup_ns == 350
    else:
        assert machine.storage is None
        assert machine.link is not None
        assert (machine.link.h2d_bytes_per_s, machine.link.copy_setup_ns) == (2_500_000_000, 350)
