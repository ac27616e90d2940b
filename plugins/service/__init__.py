"""Request rates under a latency bound: batching, MLPerf's LoadGen, and the results.

`moexport serve` is not here, but in `plugins/text/`.
"""
