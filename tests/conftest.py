"""Settings of every test run."""

from hypothesis import settings

# The same examples on every machine, and no time limit on one of them: a first call may compile.
settings.register_profile("repository", derandomize=True, deadline=None, print_blob=True)
settings.load_profile("repository")
