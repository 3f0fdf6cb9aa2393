"""The ranks of an engine: their processes, what each keeps and runs, and the end that speaks with all of them."""
