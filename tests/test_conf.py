"""Every file of conf/ composes and builds; every mistake is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from hwmodels.errors import HardwareError
from sim.build import build
from sim.simulate import simulate
from sim.types import ConfigError
from tests.configs import composed, options


@pytest.mark.parametrize("machine", options("machine"))
def test_every_machine_builds(machine: str, small_trace_file: Path) -> None:
    config = composed(f"machine={machine}", f"trace.path={small_trace_file}", "model=olmoe_1b_7b")
    assert build(config).machine.name


@pytest.mark.parametrize("model", options("model"))
def test_every_model_prices_a_trace(model: str, small_trace_file: Path) -> None:
    config = composed(f"model={model}", f"trace.path={small_trace_file}", "machine=a100_80_pcie")
    scenario = build(config)
    assert scenario.budget.pools.layer_bytes[0] > 0
    assert len(scenario.budget.pools.layer_bytes) == 4


@pytest.mark.parametrize("experiment", options("experiment"))
def test_every_experiment_composes(experiment: str) -> None:
    assert composed(f"+experiment={experiment}")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("cache.ratio=1.5", "cache.ratio = 1.5: must be a number in [0, 1]"),
        ("cache.ratio=half", "cache.ratio = half: must be a number in [0, 1]"),
        (
            "cache.bytes=-1",
            "cache.bytes = -1: must be a whole number of bytes >= 0, at most 1e18, or null",
        ),
        (
            "cache.staging_slots=0",
            "cache.staging_slots = 0: must be a whole number >= 1, at most 1000000000, or null",
        ),
        ("cache.prefetch_limit=-1", "cache.prefetch_limit = -1: must be a whole number >= 0"),
        ("workload.batch_size=0", "workload.batch_size = 0: must be a whole number >= 1"),
        ("workload.batch_size=true", "workload.batch_size = True: must be a whole number >= 1"),
        ("workload.requests=[3,99]", "workload.requests = [3, 99]: must be a range within"),
        ("workload.requests=[3,1]", "workload.requests = [3, 1]: must be a range within"),
        ("workload.requests=3", "workload.requests = 3: must be [first, last + 1]"),
        ("calibration.requests=[0,7]", "calibration.requests = [0, 7]: must be a range within"),
        ("policy.scope=tier", "policy.scope = tier: must be 'layer', 'group' or 'global'"),
        ("+policy.cahce={}", "policy.cahce: unknown key; did you mean 'cache'?"),
        (
            "policy.cache._target_=sim.policies.classic.LRV",
            "policy/lru: cache._target_ = sim.policies.classic.LRV: no such class; did you mean 'LRU'?",
        ),
        (
            "policy.cache._target_=sim.polices.LRU",
            "policy/lru: cache._target_ = sim.polices.LRU: must be a class of sim.policies",
        ),
        ("policy.cache._target_=LRU", "cache._target_ = LRU: must name a class, as package.module"),
        (
            "policy.cache._target_=sim.policies.classic",
            "sim.policies.classic: must be a CachePolicy",
        ),
        ("+policy.cache.size=3", "policy/lru: cache.size: sim.policies.classic.LRU has no such"),
        ("trace.path=null", "trace.path = None: must be a text that is not empty"),
        ("trace.path=pkg://nosuch/x", "trace.path = pkg://nosuch/x: no such package"),
        ("calibration.trace=nowhere.parquet", "calibration.trace: nowhere.parquet"),
        ("calibration.requests=[3,0]", "calibration.requests = [3, 0]: must be a range within"),
        ("output.events=maybe", "output.events = maybe: must be true or false"),
        ("policy.name=1", "policy.name = 1: must be a text"),
        ("+policy.placement=5", "policy.placement = 5: must be a group of settings"),
        ("~cache.ratio", "cache.ratio: missing, must be given"),
        ("~policy", "policy: missing, must be given"),
        ("+cache.foo=1", "cache.foo: unknown key"),
        ("+foo=1", "foo: unknown key"),
        ("workload=5", "workload = 5: must be a group of settings"),
        (
            "policy.cache._target_=sim.policies.placement.InSituCPU",
            "policy/lru: cache._target_ = sim.policies.placement.InSituCPU: must be a CachePolicy",
        ),
        ("policy.cache._target_=sys.exit", "policy/lru: cache"),
        (
            "+policy.repack={_target_:builtins.dict}",
            "policy/lru: repack._target_ = builtins.dict: builtins is a module of Python itself",
        ),
        ("machine.gpu.memory_bytes=1e9", "machine.gpu.memory_bytes = 1000000000"),
        ("machine.cpu.memory_bytes=1e8", "cache.host_bytes = 90000000: must be >= "),
        ("machine.cpu.memory_bytes=5e8 machine.storage=null", "machine.storage: missing, must be"),
        ("machine.storage.capacity_bytes=1 cache.host_bytes=4e8", "machine.storage.capacity_bytes"),
        ("cache.host_bytes=4e12", "cache.host_bytes = 4000000000000: must be <= machine.cpu"),
        (
            "cache.bytes=1.5",
            "cache.bytes = 1.5: must be a whole number of bytes >= 0, at most 1e18, or null",
        ),
        ("cache.kv_bytes=1", "cache.kv_bytes = 1: must hold at least one token"),
        ("cache.joint_bytes=1000", "cache.joint_bytes = 1000: must hold"),
        ("machine=phone_sd8gen3 policy=fiddler", "policy/fiddler: placement: a cpu_only machine"),
        ("machine=phone_sd8gen3 machine.storage=null", "machine.storage: missing, must be"),
        (
            "engine.storage_access=page_cache +policy.host={_target_:sim.policies.classic.LRU}",
            "policy/lru: host: the operating system rules the page cache",
        ),
        ("+estimate={ssd:{}}", "estimate.ssd = {}: must be figures of gpu, link, cpu or storage"),
    ],
)
def test_a_mistake_names_field_value_and_rule(
    override: str, message: str, small_trace_file: Path
) -> None:
    config = composed(f"trace.path={small_trace_file}", *override.split())
    with pytest.raises(ConfigError) as caught:
        build(config)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("~machine.link.h2d_bytes_per_s", ("machine/rtx4090", "link.h2d_bytes_per_s", "missing")),
        ("machine.link.h2d_bytes_per_s=-1", ("link.h2d_bytes_per_s", "-1", ">")),
        ("machine.cpu.cores=fast", ("cpu.cores", "fast")),
    ],
)
def test_a_bad_machine_figure_is_refused(
    override: str, parts: tuple[str, ...], small_trace_file: Path
) -> None:
    config = composed(f"trace.path={small_trace_file}", override)
    with pytest.raises(HardwareError) as caught:
        build(config)
    assert all(part in str(caught.value) for part in parts), str(caught.value)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("policy.cache.memory=abc", "policy/saem: cache.memory = abc: must be a float"),
        ("policy.cache.hysteresis=nan", "policy/saem: cache: hysteresis = nan: must be >= 1"),
        ("policy.stages.cues=wait", "policy/saem: stages: cues = wait: must be a list of words"),
        ("policy.stages.cues=['(']", "not a regular expression"),
        ("policy.stages.min_steps=1.5", "policy/saem: stages.min_steps = 1.5: must be an int"),
    ],
)
def test_a_bad_parameter_of_a_part_is_named(
    override: str, message: str, small_trace_file: Path
) -> None:
    config = composed("policy=saem", f"trace.path={small_trace_file}", override)
    with pytest.raises(ConfigError) as caught:
        build(config)
    assert message in str(caught.value)


def test_what_calibration_leaves_is_run(small_trace_file: Path) -> None:
    for span, rest in (
        ("[4,6]", [0, 1, 2, 3]),
        ("[2,4]", [0, 1, 4, 5]),
        ("[0,null]", [0, 1, 2, 3, 4, 5]),
    ):
        scenario = build(composed(f"trace.path={small_trace_file}", f"calibration.requests={span}"))
        assert [request.request_id for request in scenario.workload.requests] == rest
        assert scenario.calibration_overlaps == (len(rest) == 6)


def test_an_overlap_by_another_spelling_of_the_path_is_flagged(small_trace_file: Path) -> None:
    other = small_trace_file.parent / ".." / small_trace_file.parent.name / small_trace_file.name
    overrides = (
        f"calibration.trace={other}",
        "calibration.requests=[0,1]",
        "workload.requests=[0,1]",
    )
    assert build(composed(f"trace.path={small_trace_file}", *overrides)).calibration_overlaps


def test_policies_may_be_told_a_wrong_machine(small_trace_file: Path) -> None:
    """A link believed to be a million times faster is always worth its load."""
    common = ("policy=fiddler", f"trace.path={small_trace_file}", "machine.cpu.expert_setup_ns=0")
    right, _ = simulate(composed(*common))
    believed = ("+estimate.link.h2d_bytes_per_s=1e18", "+estimate.link.copy_setup_ns=0")
    wrong, _ = simulate(composed(*common, *believed))
    assert right["on_cpu"] > 0
    assert wrong["on_cpu"] == 0
    assert wrong["total_ns"] > right["total_ns"], "the truth has not changed"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("+estimate.lnk.h2d_bytes_per_s=1", "estimate.lnk = .*; did you mean 'link'"),
        ("+estimate.link.h2d=1", "estimate: link.h2d = 1: unknown field"),
    ],
)
def test_a_wrong_estimate_is_named(override: str, message: str, small_trace_file: Path) -> None:
    with pytest.raises((ConfigError, HardwareError), match=message):
        build(composed(f"trace.path={small_trace_file}", override))


def test_a_bad_policy_parameter_names_policy_and_rule(small_trace_file: Path) -> None:
    config = composed(f"trace.path={small_trace_file}", "policy=lfu", "policy.cache.decay=2")
    with pytest.raises(ConfigError, match=r"policy/lfu: cache: decay = 2: must be in .0.01, 1."):
        build(config)


def test_calibration_and_workload_share_no_request_by_default(small_trace_file: Path) -> None:
    scenario = build(composed("policy=static", f"trace.path={small_trace_file}"))
    assert scenario.calibration.span == (0, 1)
    assert [r.request_id for r in scenario.workload.requests] == [1, 2, 3, 4, 5]
    assert not scenario.calibration_overlaps


def test_an_overlap_of_calibration_and_workload_is_flagged(small_trace_file: Path) -> None:
    config = composed(f"trace.path={small_trace_file}", "workload.requests=[0,3]")
    assert build(config).calibration_overlaps
