"""What `rollout` measures, on top of the stages that sample and verify."""
