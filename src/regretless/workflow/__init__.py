"""Units of work: folders that are skipped and resumed, processes, workers and clusters; no stage's name in it."""
