"""What everything shares: errors, settings, files, run folders, terminal, estimates with their uncertainty."""
