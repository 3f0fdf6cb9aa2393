"""The router: takes OpenAI requests over HTTP, places them, and turns tokens into text."""
