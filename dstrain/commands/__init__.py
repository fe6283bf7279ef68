"""From what is typed to a checked job, and how a command ends."""
