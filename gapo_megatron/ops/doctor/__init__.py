"""What tools/doctor.py looks at: one module per section of its report.

Standard library only, whatever is installed: what needs a package runs in a process of its own
(`ask`), because a broken installation crashes, and a broken driver hangs.
"""
