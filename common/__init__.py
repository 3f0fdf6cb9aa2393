"""What services share."""
