"""The runner: the first process inside the sandbox, which runs the program.

It imports only the standard library, because the interpreter need not be the trainer's. Lines of
JSON come in on standard input, and replies go out on standard output:

    {"program": TEXT, "prelude": TEXT}   once: the program for the next lines
    {"stdin": TEXT}                      runs it in a new process -> {"stdout", "stderr", "failure"}
    {"calls": true}                      starts one process, which reads all further lines:
    {"function": [NAME, ...], "args": [...], "kwargs": {...}} -> {"value": V} or {"error": TEXT}
    {"check": {"code", "prelude", "entry_point"}}     runs asserts, in a sandbox of their own
        -> {"function": ...} for each call of the program, finally {"num_calls", "failure"}

As process 1 of its namespace it can be neither killed nor read by the program. It counts the memory
and CPU time of all processes of the program and kills them after every test.
"""
