"""Learning: one step, the update that follows, the schedule, and checkpoints."""
