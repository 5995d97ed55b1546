"""What leaves the machine: a model's card, the files that go to the hub, an adapter merged into its base."""
