"""An engine without a model, for simulations and load tests."""
