"""What a sweep composes of a command line is what Hydra composes of each point's overrides."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hydra.errors import HydraException
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from omegaconf.errors import OmegaConfBaseException

from sim.composing import composing
from sim.own_options import with_folders
from sim.sweeps.chunk import config_of
from sim.sweeps.composer import Composer
from sim.sweeps.grammar import Grammar
from sim.sweeps.question import question_of
from tests.searching import points, search, texts

MISTAKES = (HydraException, OmegaConfBaseException, ValueError)

GROUPS = (
    "policy=lru,saem",
    "machine=gh200",
    "machine=rtx4090,phone_sd8gen3",
    "engine=fused,serial",
)
PARTS = ("machine/gpu=a40,rtx3090", "stages@policy.stages=drift,cues", "machine/link=pcie3_x8")
FILES = ("+experiment=phone", "+experiment=demo,saem_ablation", "+mine=one,two", "policy=own,lru")
VALUES = (
    "cache.ratio=0.125,0.5",
    "cache.ratio=0.3",
    "workload.requests=[0,1],[1,2],null",
    "workload.batch_size=2,4",
    "trace.path=some.npz",
    "policy.cache.decay=0.5,0.9",
    "machine.link.h2d_bytes_per_s=1e9,2e9",
    "cache.bytes=1_000_000",
    "policy.name='a,b'",
    "output.highlight=[lru,'sa em']",
    "model.expert_bits_by_layer=[4,5.5]",
    "calibration=null",
)
SIGNED = (
    "+estimate.link.h2d_bytes_per_s=5e10,6e10",
    "+estimate.link={x:1},{x:2,y:[1,2]}",
    "++cache.ratio=0.2,0.4",
    "++cache.brand.new=1,2",
    "+cache.deep={a:{b:1}}",
    "++cache.deep.a.c=3,4",
    "++trace.extra=7",
)
REMOVED = (
    "~cache.bytes",
    "~workload.requests",
    "~workload",
    "~cache.ratio=0.25",
    "~stages@policy.stages",
)
MERGED = (
    "cache={ratio:0.75},{bytes:5}",
    "workload={length:[1,2]}",
    "cache={brand:2}",
    "estimate={}",
)
REFERENCES = (
    "workload.batch_size=${cache.prefetch_limit}",
    "cache.staging_slots=3,${workload.batch_size}",
    "+note='${cache.ratio}',x",
    "+note=$\\{cache.ratio\\},y",
    "trace.path=${oc.env:GREENROOM_NONE,here}/a.npz",
    "+estimate.ratio=${cache.ratio}",
)
ODD = (
    "workload.requests.0=4",
    "model.expert_bits_by_layer.1=8,9",
    "workload.requests=[1,2]",
    "cache=3",
    "cache=[1,2]",
    "cache.ratio.x=1",
    "no_such=1",
    "cache.no_such=1,2",
    "policy=no_such",
    "+policy=lru",
    "+cache.ratio=0.5",
    "~no_such",
    "estimate.x.y=1",
    "+trace.path.x=1",
    "cache.ratio=???",
    "workload.batch_size=",
    "++policy.cache=lfu,3",
    "policy.cache=null,{}",
)
ALL = st.sampled_from(
    [*GROUPS, *PARTS, *FILES, *VALUES, *SIGNED, *REMOVED, *MERGED, *REFERENCES, *ODD]
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Make two folders of options of one's own."""
    own = tmp_path_factory.mktemp("own")
    (own / "policy").mkdir()
    (own / "policy" / "own.yaml").write_text("defaults: [lru]\nmine: ${cache.ratio}\n")
    more = tmp_path_factory.mktemp("more")
    (more / "mine").mkdir()
    (more / "mine" / "one.yaml").write_text("a: 1\nb: {c: [1, 2]}\n")
    (more / "mine" / "two.yaml").write_text(
        "# @package _global_\ncache: {ratio: 0.9}\nextra: ${workload.batch_size}\n"
    )
    return str(own), str(more)


def of_the_sweep(
    arguments: Sequence[str], dirs: Sequence[str]
) -> list[tuple[tuple[str, ...], dict[str, Any]]] | None:
    """Return each point's overrides and what the sweep composes of them; None for a mistake."""
    try:
        with composing():
            question = question_of(arguments, dirs)
            points = [point for batch in question.batches() for point in batch]
            bases = question.composer.bases
            return [(p.overrides, config_of(bases[p.base], p.edits)) for p in points]
    except MISTAKES:
        return None


def of_hydra(overrides: Sequence[str], dirs: Sequence[str]) -> dict[str, Any] | None:
    """Return what ``greenroom sim`` gets of the overrides of one point; None for a mistake."""
    from hydra import compose
    from omegaconf import OmegaConf

    try:
        with composing():
            config = compose("config", overrides=with_folders(overrides, dirs))
            plain: Any = OmegaConf.to_container(config, resolve=True)
            return dict(plain)
    except MISTAKES:
        return None


def compare(arguments: Sequence[str], dirs: Sequence[str] = (), at_most: int = 2) -> None:
    """Compare the points of a sweep, some of them if they are many; Hydra refuses some of one refused."""
    hydra = [word for word in arguments if word.startswith("hydra.")]
    found = of_the_sweep(arguments, dirs)
    if found is None:
        assert any(of_hydra([*hydra, *words], dirs) is None for words in as_points(arguments))
        return
    for overrides, config in found[:: -(-len(found) // at_most)]:
        expected = of_hydra([*hydra, *overrides], dirs)
        assert repr(config) == repr(expected), overrides  # as text: order and types count


def as_points(arguments: Sequence[str]) -> list[list[str]]:
    """Return the overrides of each point, and those that all share, which Hydra composes beforehand."""
    with composing():
        found = search([word for word in arguments if not word.startswith("hydra.")])
        (batch,) = found.batches()
    alone = [word for word in arguments if len(points([word])) == 1]
    return [alone, *([*found.fixed, *texts(point)] for point in batch)]


@pytest.mark.parametrize(
    "arguments",
    [
        (
            "policy=lru,saem",
            "machine/gpu=a40",
            "cache.ratio=0.1,0.2",
            "output.highlight=[lru,'sa em']",
        ),
        ("cache.ratio=0.1,0.2", "stages@policy.stages=drift", "policy=saem", "policy.scope=global"),
        ("+estimate.link.x=5e10,6e10", "workload.requests=[0,1],null", "cache={ratio:0.75}"),
        ("workload.batch_size=2,4", "cache.staging_slots=${workload.batch_size}", "cache.bytes=5"),
        ("cache.ratio=0.1,0.2", "+note=${cache.ratio},x", "trace.path=${oc.env:NO_SUCH_NAME,here}"),
        (
            "cache.ratio=0.1,0.2",
            "~cache.prefetch_limit",
            "++cache.bytes=5",
            "workload.length=[1,2]",
        ),
        (
            "model.expert_bits_by_layer=[4,5.5]",
            "model.expert_bits_by_layer.1=8,9",
            "+a={b:1}",
            "++a.c=2",
        ),
        ("+experiment=phone", "engine=fused", "hydra.job.name=x", "trace.path='a,b'"),
    ],
)
def test_a_sweep_composes_what_hydra_composes(arguments: tuple[str, ...]) -> None:
    assert of_the_sweep(arguments, ()) is not None
    compare(arguments)


@pytest.mark.parametrize(
    "arguments",
    [
        ("cache.ratio=0.1,0.2", "cache.no_such=1"),
        ("policy=lru,no_such",),
        ("cache.ratio=0.1,0.2", "cache.ratio.x=1"),
    ],
)
def test_what_hydra_refuses_a_sweep_refuses(arguments: tuple[str, ...]) -> None:
    assert of_the_sweep(arguments, ()) is None
    compare(arguments)


@pytest.mark.parametrize(
    ("text", "is_edit"),
    [
        ("cache.ratio=0.25", True),
        ("workload.requests=[0,1]", True),
        ("+estimate.link.x=1", True),
        ("++cache.ratio=1", True),
        ("policy=lru", False),
        ("~cache.prefetch_limit", False),
        ("machine/gpu=a40", False),
        ("stages@policy.stages=drift", False),
        ("cache={ratio:0.5}", False),
        ("cache.ratio=${workload.batch_size}", False),
        ("cache.ratio=$\\{workload.batch_size\\}", False),
        ("model.expert_bits_by_layer.1=8", False),
    ],
)
def test_what_only_puts_a_value_somewhere_is_an_edit_of_what_hydra_composed(
    text: str, is_edit: bool
) -> None:
    with composing():
        fixed = ["policy=saem", "model.expert_bits_by_layer=[4,5.5]"]
        _, edits = Composer(fixed).place((Grammar().setting(text),))
    assert bool(edits) is is_edit


def test_options_of_ones_own_are_found_as_hydra_finds_them(folders: tuple[str, str]) -> None:
    own, more = folders
    arguments = ("policy=own,lru", "+mine=one,two", "cache.ratio=0.3", "workload.batch_size=2")
    compare((f"hydra.searchpath=[{more}]", *arguments), (own,))


def test_a_glob_finds_options_of_ones_own(folders: tuple[str, str]) -> None:
    with composing():
        question = question_of(("policy=glob([own,lru_*])",), folders)
        (batch,) = question.search.batches()
    names = [point[0].value for point in batch]
    assert "own" in names
    assert "lru_global" in names
    assert names == sorted(names)


@settings(max_examples=3, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(ALL, min_size=2, max_size=4))
def test_whatever_is_put_together_is_composed_as_hydra_does_it(
    folders: tuple[str, str], arguments: list[str]
) -> None:
    compare(arguments, folders)
