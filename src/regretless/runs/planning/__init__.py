"""What a recipe would do: its units of work, their counts, cost and time, without running them."""
