"""The data that ship with the package."""
