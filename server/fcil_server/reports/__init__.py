"""Files of a run: run directory, plots and comparison."""
