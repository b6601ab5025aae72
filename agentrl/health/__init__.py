"""Health: signs that a training goes wrong, in sentences.

`signs` reads a run's numbers, live or stored: `find_signs` is the one entry. `monitor` watches a run that goes on, its
episodes too, and reports each sign once. `dead_end` explains a reward that never changes.
"""
