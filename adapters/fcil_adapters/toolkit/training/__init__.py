"""Local optimisation: batches, augmentation and prefetch."""
