"""Moving cache bytes between processes: the port, its adapters (shm, fake), and failpoints for chaos tests."""
