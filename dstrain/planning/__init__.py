"""What a run costs, before it is started: bytes, collectives and operations of one rank among any number."""
