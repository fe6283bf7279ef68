"""What a rank keeps and computes, counted on DeepSpeed itself without a GPU."""
