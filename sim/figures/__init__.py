"""Figures of runs, sweeps and validations: one file a kind of figure. They read results and define no metric.

``sim/figures/table.py`` lists them; each is a function of a ``Source`` and of what is ``Wanted``, and raises
``NotDrawableError`` where a source lacks what it shows (all three in ``sim/figures/source.py``).
"""
