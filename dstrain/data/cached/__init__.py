"""What an encoder has written, read again: latents, tokens, embeddings."""
