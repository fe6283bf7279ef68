"""Writes what a run reports: metrics, wandb, TensorBoard, plots and the report."""
