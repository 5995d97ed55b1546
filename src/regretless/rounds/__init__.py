"""Stage `rounds`: what lies between the stages of a round, and what is measured about it."""
