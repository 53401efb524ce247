"""What the processes of a run say to each other, and the data that they share."""
