"""Uses of libraries' private parts, and changes to their behaviour. One file per library.

An upgrade of a library is read here. After its docstring every entry says:

    # Uses: the names it touches
    # Versions: in which they were read, or run, and mean what this takes them to mean
    # Upstream: the issue or pull request about it; "none found": searched for, without result

(`cpu` is Megatron-core on a machine without a GPU, `library_errors` what libraries raise of files.)
"""
