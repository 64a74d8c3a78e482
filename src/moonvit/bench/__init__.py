"""Benchmarks: each first proves that outputs are equal, then measures ours and rivals in one run.

A benchmark ends in one JSON document, which ``report`` makes: the machine, rows of case, who, metric, value and unit,
and ratios of ours to each rival.
"""
