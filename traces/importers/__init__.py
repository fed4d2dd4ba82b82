"""Other projects' routing files as traces: one file a format, named after the format.

Each reader returns a ``Trace`` of provenance ``imported`` whose header notes what the source does
not say or what was forced, and raises ``TraceError`` on what a router cannot have produced.
"""
