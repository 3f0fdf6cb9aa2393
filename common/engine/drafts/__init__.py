"""Who guesses tokens, and how drafts go on behind a handoff."""
