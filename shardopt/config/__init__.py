"""What a strategy is asked for: its options, its mesh, its optimizer and the layout of its state, checked."""
