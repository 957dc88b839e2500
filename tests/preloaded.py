"""What processes of tests need, imported once: by the server that they are forked from.

Torch, Megatron-core, vLLM and what follows them are 12 s of a core, a quarter of it the search for
cyclic garbage that is not there. What is imported is frozen: no later search looks at it again.
"""

import gc

gc.disable()

import pytest  # noqa: F401, E402

gc.freeze()
gc.enable()
