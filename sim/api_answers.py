"""The Python API's questions that need no simulation: locality, prediction, advice, and a policy's check."""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass
from io import StringIO
from typing import TYPE_CHECKING, Any

from sim.api_figures import shown
from sim.api_inputs import Inputs, PolicyLike, TraceLike
from sim.api_mistakes import plain_mistakes
from sim.api_page import Page
from sim.types import ConfigError

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

    from sim.advise import Point
    from traces.locality import Locality

Dirs = Sequence[str | os.PathLike[str]]
_PHASES = (None, "all", "prefill", "decode")


@dataclass(frozen=True, repr=False)
class Stats(Page):
    """How local a trace's routing is; shown as the page of ``greenroom stats``.

    Attributes
    ----------
    name
        What the trace is called.
    locality
        All that was measured, by layer too.
    """

    name: str
    locality: Locality

    @property
    def verdict(self) -> pd.DataFrame:
        """Questions, answers, and what they rest on."""
        import pandas as pd

        from traces.locality_verdict import judge

        rows = [asdict(one) for one in judge(self.locality)]
        return pd.DataFrame(rows).set_index("question")

    def plot(self) -> Figure:
        """Draw the page's figure."""
        from sim.stats_plot import locality_figure

        return shown(lambda: locality_figure(self.locality, self.name))

    def __repr__(self) -> str:
        from sim.stats_report import page

        return page(self.locality, self.name)


@dataclass(frozen=True, repr=False)
class Prediction(Page):
    """What is predicted of a model on a machine; shown as ``greenroom predict`` prints it.

    Attributes
    ----------
    answer
        All of it: speeds with intervals, parts of the time, memory, bottleneck, what would help.
    """

    answer: dict[str, Any]

    @property
    def tokens_per_s(self) -> float:
        """Decoded tokens a second."""
        return float(self.answer["decode"]["tokens_per_s"])

    @property
    def fits(self) -> bool:
        """Whether all memory suffices."""
        return not self.answer["problems"]

    def __repr__(self) -> str:
        from sim.predict_report import print_answer

        return _printed(lambda: print_answer(self.answer))


@dataclass(frozen=True, repr=False)
class Advice(Page):
    """The fastest ways to run a model on a machine; shown as ``greenroom advise`` prints it.

    Attributes
    ----------
    summary
        The best, the best of each scheme, what does not fit, why: as in ``advice.json``.
    table
        A row a point that was predicted, the fastest that fits first: as in ``points.csv``.
    """

    summary: dict[str, Any]
    table: pd.DataFrame
    _points: Sequence[Point]
    _print: Callable[[], None]

    def plot(self) -> Figure:
        """Draw speed against memory."""
        from sim.advise_plot import frontier_figure

        return shown(lambda: frontier_figure(self._points))

    def __repr__(self) -> str:
        return _printed(self._print)


@plain_mistakes()
def stats(
    trace: TraceLike = "tiny", *, phase: str | None = None, curve_tokens: int | None = None
) -> Stats:
    """Measure a trace's locality, as ``greenroom stats`` does.

    Parameters
    ----------
    trace
        A bundled one's name, a file, or a trace in memory.
    phase
        ``prefill``, ``decode`` or ``all``; None: decode, or all where nothing is decoded.
    curve_tokens
        First tokens to replay through caches of all sizes; None: by the model's size.

    Examples
    --------
    >>> found = greenroom.stats("tiny_logits", phase="prefill", curve_tokens=200)
    >>> found.verdict.columns.tolist()
    ['answer', 'because']
    """
    from pathlib import Path

    from sim.bundled import bundled_trace
    from sim.settings import did_you_mean
    from sim.stats_cli import measure

    if phase not in _PHASES:
        names = [str(one) for one in _PHASES[1:]]
        raise ConfigError(
            f"phase = {phase}: must be {' or '.join(names)}{did_you_mean(phase, names)}"
        )
    if curve_tokens is not None and curve_tokens < 1:
        raise ConfigError(f"curve_tokens = {curve_tokens}: must be >= 1")
    inputs = Inputs()
    path = inputs.trace_path(trace)
    bundled = isinstance(trace, str) and bundled_trace(trace) is not None
    return Stats(str(trace) if bundled else Path(path).stem, measure(path, phase, curve_tokens))


@plain_mistakes("predict")
def predict(
    *overrides: str,
    trace: TraceLike | None = None,
    quant: str | None = None,
    config_dirs: Dirs = (),
) -> Prediction:
    """Predict a model's speed and memory on a machine in closed form, as ``greenroom predict`` does.

    Parameters
    ----------
    *overrides
        Settings of ``conf/predict.yaml``: ``"model=gpt_oss_120b"``, ``"machine=rtx4090"``, ...
    trace
        Whence the use of experts is taken; None: from the group ``usage``.
    quant
        The scheme of the weights, as ``"Q4_K_M"``; None: as the model's file says.
    config_dirs
        Folders of your own options.

    Examples
    --------
    >>> found = greenroom.predict("model=gpt_oss_120b", "machine=rtx4090", "placement.cpu_layers=24")
    >>> found.fits, found.answer["bottleneck"]["part"]
    (True, 'CPU: experts')
    """
    from sim.advise import check_quants
    from sim.interval import read_errors
    from sim.predict_answer import answer
    from sim.predict_cli import ask, with_quant

    if quant is not None:
        check_quants([quant])
    inputs = Inputs()
    asked = ask(overrides, _asking(inputs, overrides, trace, config_dirs))
    return Prediction(
        answer(asked if quant is None else with_quant(asked, quant), read_errors(None))
    )


@plain_mistakes("predict")
def advise(
    *overrides: str,
    quants: Sequence[str] | None = None,
    engines: Sequence[str] | None = None,
    quality_floor: float | None = None,
    context_tokens: int | None = None,
    reserve: float | None = None,
    reserve_host: float | None = None,
    trace: TraceLike | None = None,
    config_dirs: Dirs = (),
) -> Advice:
    """Search the fastest way to run a model on a machine, as ``greenroom advise`` does.

    Parameters
    ----------
    *overrides
        As those of :func:`predict`, but for engine and placement, which are searched.
    quants, engines
        What to try; None: what is usual.
    quality_floor
        Fewest bits a weight of the experts; None: 4.
    context_tokens
        Tokens of context; None: as the settings say.
    reserve, reserve_host
        Bytes of each GPU's memory, and of the host's, that the best leaves free if that costs little speed;
        None: 1 GiB and 4 GB.

    Examples
    --------
    >>> found = greenroom.advise("model=gpt_oss_120b", "machine=rtx4090", engines=["llama_cpp"])
    >>> found.summary["best"]["settings"]
    'placement=cpu_layers placement.cpu_layers=25'
    """
    import time

    import pandas as pd

    from sim.advise import QUALITY_FLOOR, search
    from sim.advise_cli import ask_all, ground_of, wish_of
    from sim.advise_report import print_advice
    from sim.advise_reserve import GPU_RESERVE_BYTES, HOST_RESERVE_BYTES
    from sim.advise_table import summary_of, table_of

    started_s = time.monotonic()
    inputs = Inputs()
    options = _asking(inputs, overrides, trace, config_dirs)
    options.quant, options.engines = _joined(quants), _joined(engines)
    options.quality_floor = QUALITY_FLOOR if quality_floor is None else quality_floor
    options.context = context_tokens
    options.reserve = GPU_RESERVE_BYTES if reserve is None else reserve
    options.reserve_host = HOST_RESERVE_BYTES if reserve_host is None else reserve_host
    wish = wish_of(options)
    asked = ask_all(options, wish)
    points = search(asked, wish)
    ground = ground_of(next(iter(asked.values())), points)
    spent_s = time.monotonic() - started_s
    return Advice(
        summary_of(points, wish, ground, None, None),
        pd.DataFrame(table_of(points, ground.rows)),
        points,
        lambda: print_advice(points, wish, ground, None, None, spent_s),
    )


@plain_mistakes()
def check_policy(policy: PolicyLike, *overrides: str, config_dirs: Dirs = ()) -> pd.DataFrame:
    """Hold a policy against what must hold of all, as ``greenroom check-policy`` does.

    Parameters
    ----------
    policy
        As that of :func:`greenroom.simulate`.

    Returns
    -------
    DataFrame
        A row a check: its verdict (``ok``, ``fails``, ``does not apply``) and what was seen.

    Examples
    --------
    >>> "fails" in set(greenroom.check_policy("lru")["verdict"])
    False
    """
    import pandas as pd

    from sim.composing import compose_config
    from sim.conformance import findings
    from sim.own_options import with_folders

    inputs = Inputs()
    inputs.add_policies([policy])
    inputs.add_folders(config_dirs)
    settings = with_folders([*inputs.overrides, *overrides], inputs.config_dirs)
    config = compose_config("config", settings)
    return pd.DataFrame([asdict(one) for one in findings(config)]).set_index("check")


def _asking(
    inputs: Inputs, overrides: Sequence[str], trace: TraceLike | None, config_dirs: Dirs
) -> Namespace:
    """Return what the commands ask with, as their parsers give it."""
    inputs.add_folders(config_dirs)
    path = None if trace is None else inputs.trace_path(trace)
    return Namespace(overrides=list(overrides), trace=path, config_dirs=inputs.config_dirs)


def _joined(names: Sequence[str] | None) -> str | None:
    return names if names is None or isinstance(names, str) else ",".join(names)


def _printed(write: Callable[[], None]) -> str:
    """Return what a command prints."""
    page = StringIO()
    with redirect_stdout(page):
        write()
    return page.getvalue()
