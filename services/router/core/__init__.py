"""The router's decisions, without I/O: what is asked, where it goes, what is answered."""
