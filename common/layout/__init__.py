"""The arithmetic of cache layouts and of copies between them: integers in, integers out, no I/O."""
