"""Traces in other projects' formats: one file a format, named after the format.

Each writer takes a trace chunk by chunk and returns what the format has no place for.
"""
