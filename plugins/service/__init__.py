"""Measures request rates under a latency bound with MLPerf's LoadGen, and reports them.

`moexport serve` is in `plugins/text/`.
"""
