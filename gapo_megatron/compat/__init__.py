"""Uses of libraries' private parts, and changes to their behaviour. One file per library.

Check these entries when a library is upgraded. Each says, after its docstring:

    # Uses: the names it depends on
    # Versions: versions in which these were read or run, and behave as assumed
    # Upstream: the issue or pull request about it; "none found" after a search

(`cpu` emulates a GPU for Megatron-core; `library_errors` turns libraries' exceptions into ours.)
"""
