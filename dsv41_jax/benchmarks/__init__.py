"""What `launch/bench.py` measures, a module for each subcommand; each adds its flags and runs.

generate   prefill and decode of a model            kernels   every kernel beside its reference
engram     lookups of tables off the device         serve     a running server, see `dsv41_jax.load_test`
"""
