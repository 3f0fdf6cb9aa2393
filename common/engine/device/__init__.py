"""The only place that knows devices: one adapter each, behind one port."""
