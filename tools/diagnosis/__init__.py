"""Checks of tools/doctor.py: one module per section of its report.

These modules use only the standard library. What needs a package runs in a process of its own
(`ask`), because a broken installation may crash and a broken driver may hang.
"""
