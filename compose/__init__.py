"""The compose stack, and the smoke test that runs it on real containers. Not part of the installed package."""
