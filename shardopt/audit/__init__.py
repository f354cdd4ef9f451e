"""What a compiled XLA program says of itself, read off its HLO text."""
