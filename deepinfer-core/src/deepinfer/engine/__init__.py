"""The only room that sees all others: builds an engine, runs its steps, and answers the caller."""
