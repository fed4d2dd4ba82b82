"""One HTML file that tells all of a run or a sweep: no network, no metric of its own.

source (what the folder holds) -> question, verdict, tables, figures, provenance -> page. Each part returns
HTML made by ``elements``, which escapes whatever is not HTML already.
"""
