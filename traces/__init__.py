"""Router traces: what they hold, how they are stored, and where they come from.

``schema`` says what a trace is and which rules it obeys, ``store`` reads and writes Parquet,
``importers`` turn other projects' files into traces. This package imports no other of the project.
"""
