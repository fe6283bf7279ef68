"""The options of each verb: a dataclass, and checks of what goes together. Nothing here imports torch."""
