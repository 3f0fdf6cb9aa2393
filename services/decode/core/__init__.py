"""Decisions of the decode worker, as pure functions and plain bookkeeping."""
