"""What a run tells: metrics, wandb, TensorBoard, plots and the report."""
