"""Files that are whole or not there: replaced in one piece, or sealed with a hash. Needs the standard library only."""
