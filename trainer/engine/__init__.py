"""One worker's part of a replica: its slice of the model, its optimizer, its state."""
