"""The processes of a mesh. They meet only over the bus, in the terms of `contracts`."""
