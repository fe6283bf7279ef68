"""What encoding makes once, so that training need not: plans of latents, tokens and embeddings."""
