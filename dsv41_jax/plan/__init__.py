"""What a step of the model would do on machines that are not there; `launch/plan.py` is its command.

request    what is asked, checked            traffic   bytes that a step must move
worker     compiles a step, reads it          bounds    least times by what could bind
run        a process for each request         static_bundles   the TPU compiler's schedule of the whole step
find       ranks meshes                       report, text, picture   what comes out
"""

from dsv41_jax.topologies import NoCompiler

__all__ = ["NoCompiler"]
