"""The shell that the three worker roles share."""
