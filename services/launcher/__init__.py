"""The `pdmesh` command: starts a mesh on this machine, watches it, shows what its events say, and stops it."""
