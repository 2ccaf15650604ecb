"""Which method to use for these texts: tries some within a time budget and recommends a command."""
