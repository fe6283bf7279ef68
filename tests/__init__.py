"""A package of its own: else torch-fidelity's, which is installed as `tests`, too, would be taken for it."""
