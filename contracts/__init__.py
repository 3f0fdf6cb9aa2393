"""What crosses a process boundary in pdmesh, and nothing else: structs, subjects, errors. No I/O."""
