"""Diffusion and flows: schedules, losses, samplers. They take a network as an argument."""
