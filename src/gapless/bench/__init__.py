"""Benchmarks of the engine: latency, throughput, start-up, graphs, and where a step's time goes.

Everything here measures and returns plain values; what a person sees of them is the command line's affair
(``cli/bench.py``). Read ``latency.py`` for the method, ``docs/benchmarks.md`` for how to read the numbers.
"""
