"""Files that a run leaves: run directory, plots and comparison."""
