"""Views of runs and sweeps: data from their directories, shown as tables, live displays, plots and summaries."""
