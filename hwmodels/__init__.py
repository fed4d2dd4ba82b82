"""Models of hardware: what a model's parts weigh, what a machine can do, how long work takes.

Imports nothing of the other packages; every time is an int in nanoseconds.
"""
