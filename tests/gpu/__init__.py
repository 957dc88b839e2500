"""What one command, `make test-gpu`, tells of this package on a GPU; `parts` lists it.

NOT YET RUN ON A GPU. The same code runs on a CPU at tiny sizes, in tests/test_gpu_acceptance.py.
"""
