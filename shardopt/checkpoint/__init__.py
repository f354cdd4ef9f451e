"""State in and out: checked checkpoints that restore onto any mesh and strategy."""
