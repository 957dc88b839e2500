"""What processes of tests need, imported once: by the server that they are forked from.

Torch, Megatron-core, vLLM and what follows them are 12 s of a core, a quarter of it the search for
cyclic garbage that is not there. What is imported is frozen: no later search looks at it again.
"""

import gc

from gapo_megatron.run.processes import quiet_libraries

gc.disable()
quiet_libraries()

import pytest  # noqa: F401, E402

import gapo_megatron.run.run  # noqa: E402, F401

gc.freeze()
gc.enable()
