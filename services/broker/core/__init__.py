"""The protocol of a handoff, pure: no clock, no bus."""
