"""Python runs this when it starts, where this folder is in PYTHONPATH: no search for garbage.

A rank of these tests lives for seconds, and spends a quarter of them looking for cyclic garbage
among a million imported objects: while it imports them, and again when it ends.
"""

import atexit
import gc

gc.disable()
atexit.register(gc.freeze)
