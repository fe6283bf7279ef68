"""What the data hold, listed once and mapped by every process."""
