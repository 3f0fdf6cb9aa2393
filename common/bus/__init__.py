"""The control plane: one port, a NATS adapter, an in-memory adapter, and the server process itself."""
