"""Policies: each owns one choice and knows neither a driver nor a clock.

May import :mod:`sim.types` and numpy only.
"""
