"""Runs inside the sandbox as its first process, and runs the program there.

It imports the standard library alone, and the interpreter need not be the trainer's. Lines of JSON
come in on standard input and go out on standard output:

    {"program": TEXT, "prelude": TEXT}   once: what the next lines are about
    {"stdin": TEXT}                      a process each -> {"stdout": TEXT, "failure": TEXT}
    {"calls": true}                      one process, which from then on speaks for itself:
    {"function": [NAME, ...], "args": [...], "kwargs": {...}} -> {"value": V} or {"error": TEXT}
    {"check": {"code", "prelude", "entry_point"}}     the asserts, in a sandbox of their own
        -> {"function": ...} whenever they call the program, {"num_calls", "failure"} at last

As process 1 of its namespace it can neither be killed nor read by the program; it counts the
memory and CPU time of all the program's processes and ends them after every test.
"""
