"""Run by Python as it starts: engine core and worker are forked, as they are on GPUs, and need not import vLLM again.

On CPUs vLLM asks for `spawn`, which imports it three times for each engine: two thirds of the time that a start takes.
"""

import multiprocessing

_get_context = multiprocessing.get_context
multiprocessing.get_context = lambda method=None: _get_context("fork" if method == "spawn" else method)
