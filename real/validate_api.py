"""``greenroom validate`` as a function, for notebooks and scripts."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from real.validate_result import Validation
from sim.api_mistakes import plain_mistakes
from sim.api_page import Page

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, repr=False)
class Validated(Page):
    """The simulator against this machine; shown as the verdict of the report.

    Attributes
    ----------
    found
        All of it.
    """

    found: Validation

    @property
    def is_met(self) -> bool:
        """Whether every demand is met."""
        from real.validate_report import is_met

        return is_met(self.found)

    @property
    def verdict(self) -> pd.DataFrame:
        """A row a demand: the bar, what was found, whether it is met."""
        import pandas as pd

        from real.validate_score import verdict

        bars = verdict(self.found.rows, self.found.parity)
        return pd.DataFrame([asdict(bar) for bar in bars]).set_index("name")

    @property
    def table(self) -> pd.DataFrame:
        """A row a run, references last: measured and predicted, as in ``results.csv``."""
        import pandas as pd

        from real.validate_tables import run_rows

        return pd.DataFrame(run_rows(self.found))

    @property
    def report(self) -> str:
        """The whole report, Markdown."""
        from real.validate_report import report

        return report(self.found)

    def __repr__(self) -> str:
        lines = [f"{'met' if self.is_met else 'missed'}, {self.found.seconds:.0f} s"]
        rows = self.verdict.reset_index().to_dict("records")
        lines += [f"  {row['name']}: {row['words']} (must be {row['rule']})" for row in rows]
        return "\n".join(lines)


@plain_mistakes("validate")
def validate(
    *overrides: str,
    quick: bool = False,
    config_dirs: Sequence[str | os.PathLike[str]] = (),
    **settings: Any,
) -> Validated:
    """Run policies on this machine and in the simulator, as ``greenroom validate`` does.

    Parameters
    ----------
    *overrides
        Of every run, as those of ``greenroom sim``: ``"model.hidden_size=512"``.
    quick
        Three minutes instead of twenty: a first impression.
    **settings
        Those of ``conf/validate.yaml``: ``tiers=["ram"]``, ``policies=["lru", "saem"]``, ``minutes=1``, ...

    Needs torch. Raises ConfigError for a mistake.
    """
    from real.validate import validate as run
    from real.validate_config import compose_matrix

    dirs = [os.fspath(folder) for folder in config_dirs]
    given = {name: list(v) if isinstance(v, tuple) else v for name, v in settings.items()}
    return Validated(run(compose_matrix(overrides, given, quick=quick, config_dirs=dirs)))
