"""Collectives between the ranks of one worker: the port and its adapters (shared memory, threads, torch.distributed)."""
