"""Use of the model on this device: one image, a folder, a live camera."""
